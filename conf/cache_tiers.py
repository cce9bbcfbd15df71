"""The setting `device.kv_cache_tiers`: memory and a file for the blocks that leave the KV cache."""

import os
from typing import NamedTuple

from conf.support.sizes import num_bytes

TIERS_FORM = "memory:SIZE, file:FOLDER:SIZE or both, with a SIZE in bytes such as 4GB or 512MiB"


class CacheTiers(NamedTuple):
    """The limits of the tiers, in bytes. 0: the run does not have the tier."""

    memory_bytes: int = 0
    file_bytes: int = 0
    folder: str = ""
    """The folder of the file tier; empty if there is none."""


def are_tiers(texts: object) -> bool:
    """Whether a setting is a list of at most one memory tier and at most one file tier."""
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return False
    kinds = [text.partition(":")[0] for text in texts]
    return len({*kinds}) == len(kinds) and all(_is_tier(text) for text in texts)


def _is_tier(text: str) -> bool:
    kind, _, rest = text.partition(":")
    folder, _, size = rest.rpartition(":")
    return num_bytes(size) > 0 and bool(folder if kind == "file" else kind == "memory" and rest == size)


def read_tiers(texts: list[str]) -> CacheTiers:
    """Return the limits of tiers that `are_tiers` allows."""
    tiers = CacheTiers()
    for text in texts:
        kind, _, rest = text.partition(":")
        folder, _, size = rest.rpartition(":")
        if kind == "memory":
            tiers = tiers._replace(memory_bytes=num_bytes(size))
        else:
            tiers = tiers._replace(file_bytes=num_bytes(size), folder=os.path.expanduser(folder))
    return tiers


def with_absolute_folders(texts: list[str]) -> list[str]:
    """Return the tiers with an absolute folder."""
    return [_with_absolute_folder(text) if text.startswith("file:") else text for text in texts]


def _with_absolute_folder(text: str) -> str:
    folder, _, size = text.removeprefix("file:").rpartition(":")
    return f"file:{os.path.abspath(os.path.expanduser(folder))}:{size}"
