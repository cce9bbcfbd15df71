"""Find the folder or file of `model.path` or `model.tokenizer`, and download hub ids."""

import functools
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple
from urllib.parse import urlsplit

from conf.errors import UserError
from conf.schema import Hub

HUB_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?::([\w.-]+))?")  # with a quantisation tag, as in org/name-GGUF:Q4_K_M
CONFIG_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
WEIGHT_PATTERNS = ["*.safetensors"]
PICKLE_PATTERNS = ["*.bin", "*.pt", "consolidated.*.pth", "*.pdparams"]
GGUF_ENDS = [".gguf", "-*-of-*.gguf"]  # of a single file, of a split file
CONNECT_S = 6.0  # limit of DNS and connection: a resolver tries its second server after five seconds


class Client(NamedTuple):
    hub: str
    download: Callable[..., str]
    """The client's `snapshot_download(id, *, revision, allow_patterns, local_files_only)`; returns a folder."""
    offline: str | None
    """A short reason why the hub cannot be reached; None if it can be."""


def find_checkpoint(
    path: str,
    with_weights: bool,
    allow_pickle: bool,
    hub: Hub = Hub.huggingface,
    revision: str | None = None,
    key: str = "model.path",
) -> Path:
    """Return the folder or file, or the local cache folder of a hub id. Downloads the id if necessary.

    A tag after a hub id selects one of the repository's GGUF models by the end of its file name, in any letter case.
    `revision`: a branch, tag or commit of the repository; None: its default branch. `key`: the setting, for error
    messages. Raises UserError if there is no checkpoint.
    """
    local = Path(path).expanduser()
    if local.exists():
        if revision is not None:
            raise UserError(
                f"model.revision={revision} is not used by {path}, which is on disk: leave it out, or give a hub id"
            )
        return local
    id = HUB_ID.fullmatch(path)
    if id is None:
        raise UserError(
            f"there is no folder {path}: {key} must be a folder or a file that holds a model, or a hub id such as org/name "
            "or org/name:Q4_K_M"
        )
    if with_weights and not id[2] and path.lower().endswith("gguf"):
        raise UserError(
            f"{key}={path} does not select one of the repository's GGUF files: add the end of a file's name, as in {path}:Q4_K_M"
        )
    patterns = CONFIG_PATTERNS + WEIGHT_PATTERNS * with_weights + PICKLE_PATTERNS * (with_weights and allow_pickle)
    if id[2]:
        patterns = [f"*{tag}{end}" for tag in (id[2], id[2].lower(), id[2].upper()) for end in GGUF_ENDS]
    client = _modelscope() if hub is Hub.modelscope else _huggingface()
    folder = _download(f"{key}=FOLDER", path, id[1], revision, patterns, client)
    return _tagged_file(folder, path, id[2]) if id[2] else folder


def find_tokenizer(path: str, hub: Hub, revision: str | None) -> Path:
    """Return the path of `model.tokenizer`, or the local cache folder of a hub id, which is downloaded if necessary.

    A text that is not a hub id is returned as a path. Raises UserError for an id that cannot be downloaded.
    """
    local = Path(path).expanduser()
    if local.exists() or not HUB_ID.fullmatch(path):
        return local
    return find_checkpoint(path, False, False, hub, revision, "model.tokenizer")


def _download(remedy: str, path: str, id: str, revision: str | None, patterns: list[str], client: Client) -> Path:
    is_offline = client.offline is not None
    try:
        folder = Path(client.download(id, revision=revision, allow_patterns=patterns, local_files_only=is_offline))
    except Exception as error:  # errors of the client, and of the network library below it
        reason = client.offline or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        at = "" if revision is None else f" at revision {revision}"
        raise UserError(
            f"there is no folder {path}, and as {client.hub} id{at} it cannot be downloaded ({reason}): "
            f"download the model elsewhere and give {remedy}, or check the id, the network and the access to it"
        ) from error
    if is_offline and revision is not None and folder.parent.name != "snapshots":  # ModelScope before 1.38
        raise UserError(
            f"model.revision={revision} cannot be identified in {folder}, because this cache does not record revisions ({client.offline}): "
            "leave it out, or download the revision"
        )
    return folder


def _huggingface() -> Client:
    from huggingface_hub import (
        constants,
        snapshot_download,
    )  # imported here, so that a local folder does not wait for it

    offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
    return Client("a hub", snapshot_download, offline)


def _modelscope() -> Client:
    try:
        from modelscope import snapshot_download
        from modelscope.hub.utils.utils import get_endpoint
    except ImportError as error:
        remedy = "pip install 'quintet[modelscope]', or give model.hub=huggingface"
        raise UserError(f"model.hub=modelscope needs the package modelscope: {remedy}") from error
    return Client("a ModelScope", snapshot_download, _unreachable(get_endpoint()))


def _tagged_file(folder: Path, path: str, tag: str) -> Path:
    """Return the GGUF file whose name ends with the tag; of a split model, its first file.

    Raises UserError unless exactly one model matches.
    """
    ends_in_tag = re.compile(rf"(?!mmproj)(?:.*[._-])?{re.escape(tag)}(?:-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    files = sorted(file for file in folder.rglob("*") if ends_in_tag.fullmatch(file.name))
    if len(files) == 1:
        return files[0]
    names = ", ".join(str(file.relative_to(folder)) for file in files[:8])
    problem = f"{len(files)} GGUF models in it have that tag ({names})" if files else "no GGUF model in it has that tag"
    raise UserError(
        f"model.path={path}: {problem}: choose another tag from the repository's list of files, or give the path of a file on disk "
        "or the id of the Hugging Face checkpoint"
    )


@functools.cache
def _unreachable(endpoint: str) -> str | None:
    """Return a short reason if the hub does not answer, else None. The client itself would wait for tens of seconds."""
    from urllib.request import getproxies  # imported here, because it imports an HTTP client

    url = urlsplit(endpoint)
    port = url.port or {"http": 80}.get(url.scheme, 443)
    if {url.scheme, "all"} & getproxies().keys():  # the proxy resolves the hub's name
        return None
    end, reached, attempts = time.monotonic() + CONNECT_S, Event(), list[Thread]()

    def connect(address: tuple[str, int]) -> None:
        with suppress(OSError), socket.create_connection(address, timeout=CONNECT_S):
            reached.set()

    def look_up() -> None:
        with suppress(OSError):
            infos = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
            for address in dict.fromkeys(
                entry[4][:2] for entry in infos
            ):  # in parallel: one address may be unreachable
                attempts.append(Thread(target=connect, args=(address,), daemon=True))
                attempts[-1].start()

    # Daemon threads that may outlive this call, because getaddrinfo has no timeout.
    attempts.append(Thread(target=look_up, daemon=True))
    attempts[0].start()
    while any(attempt.is_alive() for attempt in attempts) and time.monotonic() < end:
        if reached.wait(0.02):
            break
    return None if reached.is_set() else f"{url.hostname} cannot be reached"
