"""Recognise GGUF models by their first bytes. Every path is asked, so this imports nothing of what reads such models."""

from pathlib import Path

MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Return whether the file begins as GGUF files do; False for what cannot be opened."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def is_gguf_layout(path: Path) -> bool:
    """Return whether the path is a GGUF file, or a folder with one and without a config.json."""
    if not path.is_dir():
        return is_gguf(path)
    return not (path / "config.json").is_file() and any(is_gguf(file) for file in path.glob("*.gguf"))
