"""The folder of compiled kernels: nothing is loaded that another user could have written, and nothing is left in it
forever."""

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.errors import UserError
from kernels import build, cache_folder
from tests.helpers.cases import each
from tests.helpers.ways import need

STRANGER = 12345


# Loading the library prints a line. It declares no function.
SOURCE = """
#include <cstdio>
#include <cstdlib>
__attribute__((constructor)) void begin() { std::fclose(std::fopen(std::getenv("LOADED"), "w")); }
extern "C" [[gnu::visibility("default")]] void *first_exported() { return nullptr; }
"""


@pytest.fixture(scope="module")
def compiled_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source next to the library that an earlier process compiled."""
    need("avx2")
    source = tmp_path_factory.mktemp("compiled") / "source.cpp"
    source.write_text(SOURCE)
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", str(source), "-o", str(source.with_suffix(".so"))]
    subprocess.run(command, check=True)
    return source


@pytest.fixture
def cache(compiled_before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with one small file, in a process that has loaded nothing yet."""
    monkeypatch.setattr(build, "sources", lambda: [compiled_before])
    monkeypatch.setattr(build, "load", build.load.__wrapped__)
    monkeypatch.setattr(build, "instruction_set", lambda: "avx2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOADED", str(tmp_path / "loaded"))
    return tmp_path / "cache" / "quintet"


@pytest.fixture
def filled(cache: Path, compiled_before: Path) -> Path:
    """Return the same cache with the library in it. It is a copy, because the code of one file would run only once in
    all tests."""
    make_own(cache)
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler is not None
    made = cache / f"kernels-avx2-{build.fingerprint(compiler, 'avx2')}.so"
    shutil.copyfile(compiled_before.with_suffix(".so"), made)
    made.chmod(0o755)
    return cache


def make_own(cache: Path) -> None:
    cache.mkdir(parents=True)
    for folder in (cache, cache.parent):
        folder.chmod(0o700)  # whatever the user's umask


def load() -> None:
    build.load("avx2")


def is_loaded(cache: Path) -> bool:
    return (cache.parents[1] / "loaded").exists()


def library_in(folder: Path) -> Path:
    (made,) = folder.glob("*.so")
    return made


def itself(path: Path) -> Path:
    return path


def above(path: Path) -> Path:
    return path.parent


REMEDIES: list[tuple[Callable[[Path], Path], str]] = [
    (library_in, "remove it, and it is made again"),
    (itself, "remove it, and it is made again"),
    (above, "make it your own with chown and chmod go-w"),
]


@each("place, remedy", REMEDIES)
@each("mode", [0o020, 0o002])
def test_files_that_others_can_write_are_not_loaded(
    filled: Path, place: Callable[[Path], Path], remedy: str, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "is_private", lambda group: False)
    path = place(filled)
    before = stat.S_IMODE(path.stat().st_mode)
    path.chmod(before | mode)
    with pytest.raises(UserError) as raised:
        build.library.__wrapped__()  # which only warns of missing kernels
    assert str(raised.value) == (
        f"{path} can be written by other users, so compiled kernels from there could be theirs and are not loaded: {remedy}, "
        "or name a folder of your own in the environment variable XDG_CACHE_HOME"
    )
    assert not is_loaded(filled)
    path.chmod(before)


def test_a_folder_above_may_be_written_by_a_group_of_the_user_alone(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With umask 002 a group that has only this user may write to parent folders. The cache folder itself is never
    writable by a group."""
    monkeypatch.setattr(cache_folder, "is_private", lambda group: True)
    filled.parent.chmod(0o770)
    load()
    assert is_loaded(filled)
    filled.chmod(0o770)
    with pytest.raises(UserError, match=f"{filled} can be written by other users"):
        load()


@each(
    "user, group, members, expected",
    [
        ("ada", "ada", [], True),
        ("ada", "ada", ["ada"], True),
        ("ada", "ada", ["bob"], False),
        ("ada", "users", [], False),  # whose first group it is, no list says
        ("root", "root", [], False),
    ],
)
def test_a_group_of_the_users_own_name_is_private(
    user: str, group: str, members: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_name=user))
    monkeypatch.setattr("grp.getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))
    assert cache_folder.is_private(STRANGER) == expected


def test_roots_group_is_private_for_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert [cache_folder.is_private(group) for group in (0, STRANGER)] == [True, False]


@each("place, remedy", REMEDIES)
def test_files_of_another_user_are_not_loaded(
    filled: Path, place: Callable[[Path], Path], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = place(filled), Path.stat

    def belongs_to_a_stranger(self: Path, **options: bool) -> os.stat_result:
        status = real(self, **options)
        return os.stat_result((*status[:4], STRANGER, *status[5:])) if self == path else status

    refused = pytest.raises(UserError, match=f"{path} belongs to another user .number {STRANGER}.*loaded: {remedy}, or")
    with monkeypatch.context() as patch, refused:
        patch.setattr(Path, "stat", belongs_to_a_stranger)
        load()
    assert not is_loaded(filled)


def test_files_of_root_are_loaded(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator may create a cache for all users. If the tests run as root, root owns everything."""
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    if os.getuid() == 0:
        load()
        assert is_loaded(filled)
    else:
        with pytest.raises(UserError, match=f"belongs to another user .number {os.getuid()}."):
            load()


def test_the_users_own_is_loaded_and_a_sticky_folder_above_it_is_not_a_danger(filled: Path) -> None:
    filled.parent.chmod(0o1777)  # as /tmp is
    load()
    assert is_loaded(filled)


def test_a_sticky_cache_is_refused(filled: Path) -> None:
    """Other users could create files in it before this user does."""
    filled.chmod(0o1777)
    with pytest.raises(UserError, match=f"{filled} can be written by other users"):
        load()


def test_folders_above_the_home_are_not_looked_at(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers they may belong to a user id without an entry."""
    outside = filled.parents[1]
    monkeypatch.setenv("HOME", str(filled.parent))
    outside.chmod(0o777)
    load()
    monkeypatch.setenv("HOME", str(outside / "elsewhere"))
    with pytest.raises(UserError, match=f"{outside} can be written by other users"):
        load()


def test_a_link_leads_to_where_the_folder_is(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = filled.parents[1] / "open"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    filled.rename(elsewhere / "quintet")
    filled.symlink_to(elsewhere / "quintet")
    with pytest.raises(UserError, match=f"{elsewhere} can be written by other users"):
        load()


def test_only_the_user_can_write_new_files_with_any_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        load()
        load()  # therefore its own folders are accepted
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache.parent, cache)] == [0o700] * 2


def test_a_cache_that_cannot_be_written_is_named(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.touch()  # a file
    assert build.library.__wrapped__() is None
    assert caplog.text.count("the CPU kernels are off") == 1
    assert "make the folder writable, or name another in the environment variable XDG_CACHE_HOME" in caplog.text


def test_an_error_of_the_compiler_is_shown(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = cache.parents[1] / "broken.cpp"
    broken.write_text("int f() { return nonsense; }")
    monkeypatch.setattr(build, "sources", lambda: [broken])
    assert build.library.__wrapped__() is None
    assert "failed; g++ 11 or later compiles the kernels. It says:" in caplog.text
    assert "nonsense" in caplog.text
    assert not list(cache.glob("*.so"))


@pytest.mark.usefixtures("cache")
def test_a_user_without_a_home_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError()))
    with pytest.raises(build.NotBuilt, match="name another in the environment variable XDG_CACHE_HOME"):
        load()


def test_a_compilation_removes_what_killed_ones_left_a_day_ago(cache: Path) -> None:
    make_own(cache)
    now, hour = time.time(), 60 * 60
    ages = {
        "tmp_killed": 25 * hour,
        "tmp_alive": 23 * hour,
        "mine": 100 * hour,
        "kernels-avx2-of-older-code.so": 1000 * hour,
    }
    for name, age in ages.items():
        (cache / name).mkdir()
        (cache / name / "0.o").touch()
        os.utime(cache / name, (now - age, now - age))
    kept_apart = cache.parent / "kept apart"
    kept_apart.mkdir()
    (cache / "tmp_link").symlink_to(kept_apart)
    os.utime(kept_apart, (0, 0))
    load()
    left = {path.name for path in cache.iterdir() if path.suffix != ".lock"}
    assert left - {library.name for library in cache.glob("kernels-avx2-????????????????.so")} == {
        *ages,
        "tmp_link",
    } - {"tmp_killed"}
    assert kept_apart.exists()


def test_folders_of_killed_compilations_are_what_compilations_make(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that never returns leaves a folder, which is removed a day later."""
    made: list[str] = []

    def killed(command: list[str]) -> None:
        made.extend(path.name for path in cache.iterdir() if path.is_dir())
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        load()
    (left,) = made
    (cache / left).mkdir()
    os.utime(cache / left, (0, 0))
    cache_folder.remove_abandoned(cache)
    assert not (cache / left).exists()
