"""manifest.json: size and sha256 of every file in a folder, to detect damage before a model is loaded."""

import hashlib
import json
from pathlib import Path
from typing import Any

from conf.errors import UserError
from models.config import ConfigReader

MANIFEST = "manifest.json"
LISTED = 8  # files named in an error


def write_manifest(folder: Path, sha256: dict[str, str]) -> None:
    """Write the folder's manifest.

    `sha256`: hashes computed during writing, by file name; other files are read and hashed.
    """
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": sha256.get(name) or _sha256(folder / name)}
        for name in sorted(_files(folder))
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def verify_manifest(path: Path) -> None:
    """Compare a folder with its manifest; ignores hidden files.

    Raises UserError with the files that differ, are missing or are not listed.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"model.verify=true, but {folder} has no {MANIFEST}: task=convert writes one, model.verify=false loads without it"
        )
    listed: dict[str, Any] = ConfigReader.from_folder(folder, MANIFEST).require("files", dict)
    faults = [fault for name, entry in listed.items() if (fault := _fault(folder, name, entry))]
    faults += [f"{name} is not listed" for name in sorted(_files(folder) - {MANIFEST} - listed.keys())]
    if faults:
        more = f" and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        raise UserError(f"{folder} differs from its {MANIFEST}: {'; '.join(faults[:LISTED])}{more}")


def _files(folder: Path) -> set[str]:
    """Return the names of all files in the folder and its subfolders (`1_Pooling/config.json`), and of empty folders.

    Leaves out hidden names.
    """
    entries = [entry for entry in folder.rglob("*") if not entry.is_dir() or not any(entry.iterdir())]
    names = [entry.relative_to(folder) for entry in entries]
    return {name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)}


def _fault(folder: Path, name: str, entry: Any) -> str | None:
    if not isinstance(entry, dict) or Path(name).is_absolute() or ".." in Path(name).parts:
        return f"{name!r} is not a valid entry: expected a file in the folder, with size and sha256"
    file = folder / name
    if not file.is_file():
        return f"{name} is missing"
    if (actual_size := file.stat().st_size) != (listed_size := entry.get("size")):
        return f"{name} has {actual_size} bytes, expected {listed_size!r}"
    if (digest := _sha256(file)) != (listed_digest := entry.get("sha256")):
        return f"{name} has sha256 {digest}, expected {listed_digest!r}"
    return None


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
