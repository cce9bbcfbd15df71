"""From `model.path` to a folder on disk."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from conf.errors import UserError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WANTED = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt", "*.tiktoken"]
PICKLES = ["*.bin"]


def find_folder(path: str, allow_pickle: bool) -> Path:
    """The folder itself, or the hub's files in the local cache (downloaded where needed). Raises UserError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{path} is a file: model.path must be a folder in Hugging Face layout, or a hub id")
    if not HUB_ID.fullmatch(path):
        raise UserError(
            f"there is no folder {path}: model.path must be a folder in Hugging Face layout, or a hub id such as org/name"
        )
    try:
        return Path(snapshot_download(path, allow_patterns=WANTED + PICKLES * allow_pickle, etag_timeout=10))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"there is no folder {path}, and as a hub id it cannot be downloaded ({type(error).__name__}: {reason}): "
            "download the model elsewhere and give model.path=FOLDER, or check the id, the network and the access to it"
        ) from error
