"""From model.path to a folder: local folders, the hub's cache, one clear error if there is neither."""

import shutil
import socket
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

import models.formats.hub
from conf.errors import UserError
from conf.schema import Hub
from models.formats import open_checkpoint
from models.formats.hub import find_checkpoint, find_commit, find_downloaded, find_tokenizer
from tests.helpers.cases import each
from tests.helpers.modelscope_cache import use_modelscope


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def store(*files: str) -> Path:
    """Write the hub's cache of org/name with only these files."""
    entry, commit = Path(constants.HF_HUB_CACHE) / "models--org--name", "0" * 40
    shutil.rmtree(entry, ignore_errors=True)
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(commit)
    for name in files:
        file = entry / "snapshots" / commit / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"GGUF")
    return entry / "snapshots" / commit


@each("with_weights", [True, False])
@each(
    "tag, file",
    [
        ("Q4_K_M", "name-Q4_K_M.gguf"),
        ("q4_k_m", "name-Q4_K_M.gguf"),
        ("Q4_K", "name.q4_k.gguf"),
        ("Q8_0", "Q8_0/name-Q8_0-00001-of-00002.gguf"),
        ("F16", "F16.gguf"),
    ],
)
def test_a_tag_chooses_a_gguf_file(tag: str, file: str, with_weights: bool) -> None:
    folder = store(
        "name-Q4_K_M.gguf",
        "name-Q4_K_S.gguf",
        "name.q4_k.gguf",
        "name-IQ4_K.gguf",
        "mmproj-F16.gguf",
        "F16.gguf",
        "Q8_0/name-Q8_0-00001-of-00002.gguf",
        "Q8_0/name-Q8_0-00002-of-00002.gguf",
        "name-Q4_K_M.gguf.json",
    )
    assert find_checkpoint(f"org/name:{tag}", with_weights=with_weights, allow_pickle=False) == folder / file


@each(
    "tag, message",
    [
        ("Q6_K", "model.path=org/name:Q6_K: no GGUF model in it has that tag: .*the id of the Hugging Face checkpoint"),
        ("4_K_M", "no GGUF model in it has that tag"),
        ("Q4_K_M", r"2 GGUF models in it have that tag \(a-Q4_K_M.gguf, b/b-q4_k_m.gguf\): .*choose another tag"),
    ],
)
def test_a_tag_of_no_one_file(tag: str, message: str) -> None:
    store("a-Q4_K_M.gguf", "b/b-q4_k_m.gguf", "model.safetensors")
    with pytest.raises(UserError, match=message) as raised:
        find_checkpoint(f"org/name:{tag}", with_weights=True, allow_pickle=False)
    assert "\n" not in str(raised.value)


@each("path", ["org/name-GGUF", "org/name.gguf"])
def test_a_repository_of_gguf_files_needs_a_tag(path: str) -> None:
    """It does not download the other files, or report weights that they lack."""
    with pytest.raises(
        UserError, match=f"model.path={path} does not select one .*: add the end of a file's name, as in {path}:Q4"
    ):
        find_checkpoint(path, with_weights=True, allow_pickle=False)


@pytest.mark.usefixtures("direct")
def test_a_tag_downloads_its_files_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = [
        "README.md",
        "config.json",
        "x-Q8_0.gguf",
        "x-Q4_K_M.gguf",
        "q8_0/x-q8_0-00001-of-00002.gguf",
        "x.safetensors",
    ]
    asked: list[list[str]] = []

    def download(id: str, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        assert id == "org/name"
        asked.append(list(filter_repo_objects(there, allow_patterns=allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr(models.formats.hub, "_unreachable", lambda endpoint: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for tag in ("Q4_K_M", "q4_k_m", "Q8_0"):
        with pytest.raises(UserError, match="no GGUF model"):
            find_checkpoint(f"org/name:{tag}", with_weights=True, allow_pickle=False)
    assert asked == [["x-Q4_K_M.gguf"], ["x-Q4_K_M.gguf"], ["x-Q8_0.gguf", "q8_0/x-q8_0-00001-of-00002.gguf"]]


@each(
    "path, message",
    [
        (
            "org/name",
            r"there is no folder org/name, and as a hub id it cannot be downloaded \(HF_HUB_OFFLINE is set\): .*=FOLDER",
        ),
        (
            "/nowhere/at/all",
            "there is no folder /nowhere/at/all: model.path must be a folder or a file .* or a hub id such as org/name",
        ),
        ("org/name:Q4_K_M", r"there is no folder org/name:Q4_K_M, and as a hub id it .*\(HF_HUB_OFFLINE is set\)"),
        ("org/name:", "there is no folder org/name:: model.path must be"),
        ("org/name:a/b", "there is no folder org/name:a/b: model.path must be"),
        ("org/name:*", "there is no folder org/name:.*: model.path must be"),
        ("nowhere", "there is no folder nowhere"),
        ("../nowhere/model", "there is no folder ../nowhere/model"),
        ("a b/c", "there is no folder a b/c"),
    ],
)
def test_nothing_there_is_one_clear_error(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        find_checkpoint(path, with_weights=True, allow_pickle=False)
    assert "\n" not in str(raised.value)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the client online and without a proxy."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(UserError) as raised:
        find_checkpoint("org/name", with_weights=True, allow_pickle=False)
    return str(raised.value)


@pytest.mark.usefixtures("direct")
def test_without_a_network_the_answer_is_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # but no server listens
        line = refused(f"http://127.0.0.1:{unused.getsockname()[1]}", monkeypatch)
    assert line == (
        "there is no folder org/name, and as a hub id it cannot be downloaded (127.0.0.1 cannot be reached): "
        "download the model elsewhere and give model.path=FOLDER, or check the id, the network and the access to it"
    )


@pytest.mark.usefixtures("direct")
def test_a_network_that_swallows_everything_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended, names = threading.Event(), threading.Event(), []

    def hangs(name: str, port: int, type: int) -> None:  # without a name server
        names.append((name, port))
        begun.set()
        ended.wait(60)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    monkeypatch.setattr(models.formats.hub, "CONNECT_S", 0.01)
    assert "(hub.invalid cannot be reached)" in refused("https://hub.invalid", monkeypatch)
    assert "(hub.invalid cannot be reached)" in refused("https://hub.invalid", monkeypatch)
    assert begun.wait(60)  # on a busy machine it may begin after it was given up
    assert (names, ended.is_set()) == ([("hub.invalid", 443)], False)  # once per process
    ended.set()


@pytest.mark.usefixtures("direct")
def test_one_address_that_leads_nowhere_does_not_hide_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example an IPv6 route that drops everything and whose address comes first."""
    ended = threading.Event()

    def hangs(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "2001:db8::1":
            ended.wait(60)
            raise OSError
        connection = socket.socket()
        connection.connect(address)
        return connection

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        addresses = [(0, 0, 0, "", (host, port)) for host in ("2001:db8::1", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        monkeypatch.setattr(socket, "create_connection", hangs)
        monkeypatch.setattr(constants, "ENDPOINT", f"https://hub.invalid:{port}")
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", lambda *_, local_files_only, **__: str(local_files_only)
        )
        assert find_checkpoint("org/name", with_weights=True, allow_pickle=False) == Path("False")
    ended.set()


@pytest.mark.usefixtures("direct")
@each("proxy", [None, "http://proxy.invalid:1"])
def test_an_unreachable_hub_leaves_only_the_cache(proxy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(path: str, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        assert local_files_only == (proxy is None)  # only the client can tell what a proxy reaches
        return "/found"

    if proxy:
        monkeypatch.setenv("https_proxy", proxy)
    monkeypatch.setattr(constants, "ENDPOINT", f"https://127.0.0.1:{1 if proxy else 2}")  # no server listens there
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_checkpoint("org/name", with_weights=True, allow_pickle=False) == Path("/found")


def test_a_file_of_no_known_kind(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    path = find_checkpoint(str(tmp_path / "model.onnx"), with_weights=True, allow_pickle=False)
    with pytest.raises(UserError, match="model.onnx is a file: model.path must be a folder"):
        open_checkpoint(path, allow_pickle=False)


def test_a_revision_is_a_branch_a_tag_or_a_commit(tmp_path: Path) -> None:
    """In the cache, where each revision is a separate folder. The id names it, or the setting."""
    assert find_checkpoint(str(tmp_path), with_weights=True, allow_pickle=False) == tmp_path
    entry, commit = store("config.json").parent.parent, "1" * 40
    (entry / "refs" / "v1").write_text(commit)
    (entry / "snapshots" / commit).mkdir()
    (entry / "snapshots" / commit / "config.json").write_text("{}")
    for revision, expected in ((None, "0" * 40), ("main", "0" * 40), ("v1", commit), (commit, commit)):
        id = "org/name" if revision is None else f"org/name@{revision}"
        for folder in (
            find_checkpoint("org/name", True, False, revision=revision),
            find_checkpoint(id, True, False, revision=revision),
            find_checkpoint(id, True, False),
            find_tokenizer("org/name", Hub.huggingface, revision),
            find_tokenizer(id, Hub.huggingface, None if revision is None else "v9"),
            find_downloaded(id, Hub.huggingface, None),
        ):
            assert folder == entry / "snapshots" / expected
            assert folder is not None
            assert (folder / "config.json").is_file()
        assert find_commit(id, Hub.huggingface, None, "model.path") == expected
    with pytest.raises(
        UserError, match=r"org/name, and as a hub id at revision v2 it cannot .*\(HF_HUB_OFFLINE is set"
    ):
        find_checkpoint("org/name", True, False, revision="v2")
    with pytest.raises(UserError, match=r"org/other, and as a hub id .*: download .* and give model.tokenizer=FOLDER"):
        find_tokenizer("org/other", Hub.huggingface, None)
    with pytest.raises(
        UserError, match="^model.revision=v1 is not used by .*, which is on disk: leave it out, or give a"
    ):
        find_checkpoint(str(tmp_path), True, False, revision="v1")


def test_an_id_with_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag of GGUF files is before the revision."""
    snapshot = store("config.json", "x-Q8_0.gguf")
    (snapshot.parent.parent / "refs" / "v1").write_text(snapshot.name)
    assert find_checkpoint("org/name:Q8_0@v1", True, False) == snapshot / "x-Q8_0.gguf"
    assert find_downloaded("org/name:Q8_0@v1", Hub.huggingface, None) == snapshot / "x-Q8_0.gguf"
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "x").mkdir()
    for path, message in (
        ("org/name@v1:Q8_0", "there is no folder org/name@v1:Q8_0: model.path must be .* or org/name:Q4_K_M@REVISION"),
        ("org/name@", "there is no folder org/name@: model.path must be"),
        ("org/name-GGUF@v1", "add the end of a file's name, as in org/name-GGUF:Q4_K_M"),
        (f"{tmp_path.name}/x@v1", "has a revision, but .*x is on disk: give .*x, or a hub id"),
    ):
        with pytest.raises(UserError, match=message):
            find_checkpoint(path, True, False)
    with pytest.raises(
        UserError, match="^model.revision=v2 contradicts model.path=org/name@v1: give model.path=org/name"
    ):
        find_checkpoint("org/name@v1", True, False, revision="v2")
    for path in ("org/other", "org/name@v9", "org/name:Q4_K_M@v1", "/nowhere/x"):
        assert find_downloaded(path, Hub.huggingface, None) is None
    assert find_commit(str(tmp_path), Hub.huggingface, None, "model.path") is None


def test_an_id_of_modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its cache, in the layouts of modelscope-hub 0.5 and of modelscope before 1.38, which has no revisions."""
    cache = tmp_path / ".cache" / "modelscope" / "hub" / "models"

    use_modelscope(cache, monkeypatch)
    for place in ("old/name", "org--name/snapshots/master", "org--name/snapshots/v1"):
        (cache / place).mkdir(parents=True)
    for id, revision, place in (
        ("org/name", None, "org--name/snapshots/master"),
        ("org/name", "v1", "org--name/snapshots/v1"),
        ("old/name", None, "old/name"),
    ):
        assert find_checkpoint(id, True, False, Hub.modelscope, revision) == cache / place
    there = r"there is no folder org/name, and as a ModelScope id at revision v2 it .*\(https://modelscope.invalid cannot be"
    for id, revision, message in (
        ("org/name", "v2", there),
        (
            "old/name",
            "v1",
            "model.revision=v1 cannot be identified in .*/old/name, because this cache does not record revisions",
        ),
    ):
        with pytest.raises(UserError, match=message):
            find_checkpoint(id, True, False, Hub.modelscope, revision)
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match=r"needs the package modelscope: pip install 'quintet\[modelscope\]', or give"):
        find_checkpoint("org/name", True, False, Hub.modelscope)
