"""Reject folders that look like a checkpoint but are not one.

The error says what the folder is, and what to use instead.
"""

from pathlib import Path

from conf.errors import UserError
from models.config import read_json

POINTER = b"version https://git-lfs"  # start of a file that `git lfs pull` has not replaced
MOST_POINTER_BYTES = 1024


def refuse_other_folders(folder: Path) -> None:
    """Raise UserError for Git LFS pointers, adapters, folders of the hub's cache, and files of other tools."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.stat().st_size <= MOST_POINTER_BYTES and file.read_bytes().startswith(POINTER):
            raise UserError(f"{file} is a Git LFS pointer, not the file itself: run git lfs pull in its folder")
    if not (folder / "config.json").is_file():
        _refuse_without_config(folder)
        return
    config = read_json(folder / "config.json")
    if "compression_config" in config:
        raise UserError(
            f"{folder}: config.json has compression_config, the key of an old tool: rename it to quantization_config"
        )
    if (folder / "quantize_config.json").is_file() and not config.get("quantization_config"):
        raise UserError(
            f"{folder} has its quantisation only in quantize_config.json: copy it into config.json as quantization_config, "
            'with "quant_method": "gptq"'
        )
    if (
        (files := sorted(folder.glob("*.gguf")))
        and not any(folder.glob("*.safetensors*"))
        and not any(folder.glob("*.bin*"))
    ):
        raise UserError(f"{folder} holds a config.json and {files[0].name}: give model.path={files[0]}")


def _refuse_without_config(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        raise UserError(
            f"{folder} is an adapter of {base}: give {base} as model.path, and the adapter as model.adapters={{NAME: {folder}}}"
        )
    if (folder / "snapshots").is_dir():
        snapshots = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
        where = f"model.path={snapshots[-1]}" if snapshots else "download it again"
        raise UserError(f"{folder} is a folder of the hub's cache: give the model's id, or {where}")
