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

# With a quantisation tag, as in org/name-GGUF:Q4_K_M, and behind it a revision, as in org/name@v1.
HUB_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?::([\w.-]+))?(?:@([\w.-][\w./+-]*))?")
COMMIT = re.compile("[0-9a-f]{40}")
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
    `revision`: a branch, tag or commit of the repository, which `@REVISION` at the end of the id gives too; None: its
    default branch. `key`: the setting, for error messages. Raises UserError if there is no checkpoint.
    """
    local = Path(path).expanduser()
    if local.exists():
        if revision is not None:
            raise UserError(
                f"model.revision={revision} is not used by {path}, which is on disk: leave it out, or give a hub id"
            )
        return local
    id, tag, revision = _read_id(path, revision, key)
    if with_weights and not tag and id.lower().endswith("gguf"):
        raise UserError(
            f"{key}={path} does not select one of the repository's GGUF files: add the end of a file's name, as in {id}:Q4_K_M"
        )
    patterns = CONFIG_PATTERNS + WEIGHT_PATTERNS * with_weights + PICKLE_PATTERNS * (with_weights and allow_pickle)
    folder = _download(path, id, revision, _patterns(tag) or patterns, _client(hub), key)
    return _tagged_file(folder, path, tag) if tag else folder


def find_tokenizer(path: str, hub: Hub, revision: str | None) -> Path:
    """Return the path of `model.tokenizer`, or the local cache folder of a hub id, which is downloaded if necessary.

    `revision`: of an id without its own. A text that is not a hub id is returned as a path. Raises UserError for an id
    that cannot be downloaded.
    """
    local, id = Path(path).expanduser(), HUB_ID.fullmatch(path)
    if local.exists() or id is None:
        return local
    return find_checkpoint(path, False, False, hub, None if id[3] else revision, "model.tokenizer")


def find_commit(path: str, hub: Hub, revision: str | None, key: str) -> str | None:
    """Return the commit of a hub id's revision. Downloads only config.json.

    A cache without commits, such as ModelScope's, gives the revision itself. None for a path that is on disk, and for a
    text that is not a hub id. Raises UserError if the id cannot be downloaded.
    """
    if Path(path).expanduser().exists() or not HUB_ID.fullmatch(path):
        return None
    id, _, revision = _read_id(path, revision, key)
    folder = _download(path, id, revision, ["config.json"], _client(hub), key)
    return folder.name if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) else revision


def find_downloaded(path: str, hub: Hub, revision: str | None) -> Path | None:
    """Return the folder or file of a path or of a hub id, without any download; None if it is not on this machine."""
    local, match = Path(path).expanduser(), HUB_ID.fullmatch(path)
    if local.exists() or match is None:
        return local if local.exists() else None
    id, tag, own_revision = match.groups()
    with suppress(Exception):  # errors of the client, and UserErrors of a tag
        client = _client(hub)
        patterns = _patterns(tag) or CONFIG_PATTERNS
        folder = client.download(id, revision=own_revision or revision, allow_patterns=patterns, local_files_only=True)
        return _tagged_file(Path(folder), path, tag) if tag else Path(folder)
    return None


def without_revision(path: str) -> tuple[str, str | None]:
    """Return a hub id without its revision, and the revision. A path that is on disk has none."""
    match = HUB_ID.fullmatch(path)
    if match is None or not match[3] or Path(path).expanduser().exists():
        return path, None
    return path.removesuffix(f"@{match[3]}"), match[3]


def _read_id(path: str, revision: str | None, key: str) -> tuple[str, str | None, str | None]:
    """Return a hub id's repository, tag and revision. Raises UserError for another text, and for a second revision."""
    match = HUB_ID.fullmatch(path)
    if match is None:
        raise UserError(
            f"there is no folder {path}: {key} must be a folder or a file that holds a model, or a hub id such as org/name, "
            "org/name:Q4_K_M, org/name@REVISION or org/name:Q4_K_M@REVISION"
        )
    id, tag, own_revision = match.groups()
    bare = path.removesuffix(f"@{own_revision}")
    if own_revision and Path(bare).expanduser().exists():
        raise UserError(f"{key}={path} has a revision, but {bare} is on disk: give {bare}, or a hub id")
    if own_revision and revision not in (None, own_revision):
        raise UserError(
            f"model.revision={revision} contradicts {key}={path}: give {key}={bare} with it, or leave it out"
        )
    return id, tag, own_revision or revision


def _patterns(tag: str | None) -> list[str]:
    """Return the patterns of a tag's GGUF files; without a tag, none."""
    return [f"*{name}{end}" for name in (tag, tag.lower(), tag.upper()) for end in GGUF_ENDS] if tag else []


def _client(hub: Hub) -> Client:
    return _modelscope() if hub is Hub.modelscope else _huggingface()


def _download(path: str, id: str, revision: str | None, patterns: list[str], client: Client, key: str) -> Path:
    is_offline = client.offline is not None
    try:
        folder = Path(client.download(id, revision=revision, allow_patterns=patterns, local_files_only=is_offline))
    except Exception as error:  # errors of the client, and of the network library below it
        reason = client.offline or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        at = "" if revision is None else f" at revision {revision}"
        raise UserError(
            f"there is no folder {path}, and as {client.hub} id{at} it cannot be downloaded ({reason}): "
            f"download the model elsewhere and give {key}=FOLDER, or check the id, the network and the access to it"
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
