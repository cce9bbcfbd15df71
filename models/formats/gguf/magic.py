"""What is a GGUF model, by the first bytes of files: asked of every path, so it needs nothing of what reads such models."""

from pathlib import Path

MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Raises nothing: what cannot be opened is none."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def is_gguf_layout(path: Path) -> bool:
    """A GGUF file, or a folder with one and without a config.json."""
    if not path.is_dir():
        return is_gguf(path)
    return not (path / "config.json").is_file() and any(is_gguf(file) for file in path.glob("*.gguf"))
