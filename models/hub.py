"""From `model.path` to a folder or a file on disk."""

import re
from pathlib import Path

from conf.errors import UserError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WANTED = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
WEIGHTS = ["*.safetensors"]
PICKLES = ["*.bin", "*.pt", "consolidated.*.pth"]


def find_checkpoint(path: str, with_weights: bool, allow_pickle: bool) -> Path:
    """The folder or file itself, or the hub's files in the local cache (downloaded where needed). Raises UserError."""
    local = Path(path).expanduser()
    if local.exists():
        return local
    if not HUB_ID.fullmatch(path):
        raise UserError(
            f"there is no folder {path}: model.path must be a folder or a file that holds a model, or a hub id such as org/name"
        )
    from huggingface_hub import snapshot_download  # here, because a folder on disk need not wait for a network library

    try:
        patterns = WANTED + WEIGHTS * with_weights + PICKLES * (with_weights and allow_pickle)
        return Path(snapshot_download(path, allow_patterns=patterns, etag_timeout=10))
    except Exception as error:  # the client's own errors and those of the network library below it
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"there is no folder {path}, and as a hub id it cannot be downloaded ({type(error).__name__}: {reason}): "
            "download the model elsewhere and give model.path=FOLDER, or check the id, the network and the access to it"
        ) from error
