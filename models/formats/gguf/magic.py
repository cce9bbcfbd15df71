"""Recognise GGUF models by their first bytes.

This check runs for every path, so the module does not import the reader.
"""

from pathlib import Path

MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Return whether the file begins with the GGUF magic; False if it cannot be opened."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def is_gguf_layout(path: Path) -> bool:
    """Return whether the path is a GGUF file, or a folder with a GGUF file and without config.json."""
    if not path.is_dir():
        return is_gguf(path)
    return not (path / "config.json").is_file() and any(is_gguf(file) for file in path.glob("*.gguf"))
