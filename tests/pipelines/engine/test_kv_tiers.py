"""The tiers of the KV cache alone: limits, order of eviction, and files that are damaged, foreign, full or in use."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from pipelines.engine import file_tier
from pipelines.engine.file_tier import ENTRY, FILE, PAGE, FileTier
from pipelines.engine.memory_tier import MemoryTier
from tests.helpers.cases import each

SIZE, IDENTITY = 5000, bytes(range(32))  # SIZE is not a multiple of a page
FOUR = 2 * PAGE + 4 * (ENTRY.size + SIZE)


Tier = MemoryTier | FileTier


class Given(NamedTuple):
    folder: Path
    caplog: pytest.LogCaptureFixture
    monkeypatch: pytest.MonkeyPatch


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> Tensor:
    return torch.randint(256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def put(tier: Tier, *numbers: int) -> None:
    for number in numbers:
        if tier.wants(key(number)):
            tier.put(key(number), content(number))


def held(tier: Tier, numbers: range) -> list[int]:
    """Return the numbers whose contents the tier holds. Their bytes must be unchanged."""
    found = {number: tier.get(key(number)) for number in numbers}
    assert all(torch.equal(value, content(number)) for number, value in found.items() if value is not None)
    return [number for number, value in found.items() if value is not None]


def file_in(folder: Path, max_bytes: int = FOUR, identity: bytes = IDENTITY) -> FileTier:
    return FileTier(folder, max_bytes, identity, SIZE)


def written(folder: Path, *numbers: int) -> Path:
    """Write contents as a process does that ends, and return the file."""
    tier = file_in(folder)
    put(tier, *numbers)
    tier.close()
    return folder / FILE


def check_reopened(folder: Path, expected: list[int], warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    tier = file_in(folder)
    try:
        assert held(tier, range(10)) == expected
        assert len(caplog.records) == warnings
        assert all("\n" not in record.getMessage() for record in caplog.records)
        tier.check_integrity()
        put(tier, 9)
        assert 9 in held(tier, range(10))
    finally:
        tier.close()


def _evicts_the_least_recently_used(given: Given) -> None:
    """The order of the writes survives in a file."""
    path = written(given.folder, 1, 2, 3, 4)
    memory, file = MemoryTier(4, SIZE), file_in(given.folder)
    put(memory, 1, 2, 3, 4)
    tiers: tuple[Tier, ...] = memory, file
    for tier in tiers:
        assert held(tier, range(10)) == [1, 2, 3, 4]
        assert not tier.wants(key(1))  # now 2 is the least recently used
        put(tier, 5, 6)
    file.close()
    assert path.stat().st_size <= FOUR
    for tier in (memory, file_in(given.folder)):
        assert held(tier, range(10)) == [1, 4, 5, 6]
        tier.check_integrity()


def _the_last_used_content_is_written_first(given: Given) -> None:
    """A process that is killed while it ends keeps the beginnings of prompts. After a restart they are evicted last."""
    written(given.folder, 8)
    tier = file_in(given.folder)
    tier.begin_last(3)
    for number in (1, 2, 3):
        tier.put_last(key(number), content(number))
    tier.close()
    for number, expected in ((4, [1, 2, 3, 4]), (5, [1, 2, 4, 5]), (6, [1, 4, 5, 6])):
        written(given.folder, number)
        tier = file_in(given.folder)
        assert held(tier, range(10)) == expected
        tier.close()


def _contents_are_kept_over_random_uses(given: Given) -> None:
    """The memory tier is compared with a list in the order of use. The writer chooses the order in the file."""
    generator, order = random.Random(0), list[int]()
    memory, file = MemoryTier(4, SIZE), file_in(given.folder)
    for _ in range(200):
        number = generator.randrange(9)
        put(memory, number)
        put(file, number)
        order = [*(other for other in order if other != number), number][-4:]
        assert held(memory, range(9)) == sorted(order)
        assert len(held(file, range(9))) <= 9
        memory.check_integrity()
        file.check_integrity()
    file.close()


def _torn_and_damaged_contents_are_ignored(given: Given) -> None:
    def damage(name: str, offset: int, data: bytes) -> Path:
        path = written(given.folder / name, 1, 2, 3)
        with open(path, "r+b") as stream:
            stream.seek(offset)
            stream.write(data)
        return path

    first_content = 2 * PAGE
    # Places are given in order, so the content of 2 is in place 1.
    check_reopened(damage("content", first_content + SIZE + 17, b"torn").parent, [1, 3], 1, given.caplog)
    check_reopened(
        damage("killed while it writes", PAGE + ENTRY.size, bytes(ENTRY.size)).parent, [1, 3], 0, given.caplog
    )
    check_reopened(damage("checksum", PAGE + ENTRY.size + 32, b"x").parent, [1, 3], 1, given.caplog)
    check_reopened(damage("number", PAGE + ENTRY.size + 48, b"\xff" * 8).parent, [1, 3], 0, given.caplog)
    check_reopened(damage("hash", PAGE + ENTRY.size, key(7)).parent, [1, 3], 1, given.caplog)
    for name, offset, data in (("magic", 0, b"x"), ("identity", 24, b"x"), ("size", 64, b"x")):
        check_reopened(damage(name, offset, data).parent, [], 1, given.caplog)
    for end in (10, PAGE + 10, first_content + SIZE + 10):
        path = written(given.folder / f"cut at {end}", 1, 2, 3)
        os.truncate(path, end)
        check_reopened(path.parent, [], 1, given.caplog)
    (given.folder / "text").mkdir()
    (given.folder / "text" / FILE).write_text("not a tier")
    check_reopened(given.folder / "text", [], 1, given.caplog)


def _files_of_another_identity_or_size_are_emptied(given: Given) -> None:
    for number, changes in enumerate(({"identity": bytes(32)}, {"max_bytes": FOUR + SIZE + ENTRY.size})):
        path = written(given.folder / str(number), 1, 2)
        path.chmod(0o644)
        given.caplog.clear()
        tier = file_in(path.parent, **changes)  # type: ignore[arg-type]
        assert held(tier, range(10)) == []
        (record,) = given.caplog.records
        message = (
            f"{path} is damaged, or of another model, setting, version or size: its blocks are ignored and replaced"
        )
        assert record.getMessage() == f"device.kv_cache_tiers: {message}"
        tier.close()
        assert path.stat().st_mode & 0o777 == 0o600


def _a_full_disk_ends_the_writing(given: Given) -> None:
    given.caplog.clear()
    written(given.folder, 1)
    tier, pwrite = file_in(given.folder), os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        """Write the first 100 bytes of a content, then nothing."""
        if ENTRY.size < len(data) < SIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data[:100], offset)

    with given.monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        put(tier, 2, 3)
        tier._writer.join()
    assert [record.getMessage().partition(" cannot be written ")[2] for record in given.caplog.records] == [
        "(No space left on device): it is only read now"
    ]
    put(tier, 4)
    assert held(tier, range(10)) == [1]
    tier.check_integrity()
    tier.close()
    check_reopened(given.folder, [1], 0, given.caplog)


def _a_full_queue_drops_the_oldest(given: Given) -> None:
    given.monkeypatch.setattr(file_tier, "QUEUE_BYTES", 2 * SIZE)
    given.monkeypatch.setattr(file_tier._Records, "write_pending", lambda records: None)
    tier = file_in(given.folder)
    put(tier, 1, 2, 3)
    assert held(tier, range(10)) == [2, 3]


def _refusals_name_the_limit(given: Given) -> None:
    with pytest.raises(
        UserError, match=f"tiers: 100 bytes hold no block: give at least {FOUR - 3 * (ENTRY.size + SIZE)}"
    ):
        file_in(given.folder, 100)
    with pytest.raises(UserError, match=r"tiers: \d+ bytes are more than the \d+ that .* may take: give fewer bytes"):
        file_in(given.folder, 10**18)
    (given.folder / "file").touch()
    with pytest.raises(UserError, match="cannot be written .*: give another folder, or leave the file tier out"):
        file_in(given.folder / "file")
    (given.folder / "link").mkdir()
    (given.folder / "link" / FILE).symlink_to(given.folder / "file")
    with pytest.raises(UserError, match="cannot be written"):
        file_in(given.folder / "link")
    tier = file_in(given.folder / "used")
    with pytest.raises(UserError, match="another process uses .*used/kv_cache.tier: give each process its own folder"):
        file_in(given.folder / "used")
    tier.close()


CHECKS = (
    _evicts_the_least_recently_used,
    _the_last_used_content_is_written_first,
    _contents_are_kept_over_random_uses,
    _torn_and_damaged_contents_are_ignored,
    _files_of_another_identity_or_size_are_emptied,
    _a_full_disk_ends_the_writing,
    _a_full_queue_drops_the_oldest,
    _refusals_name_the_limit,
)


@each("check", CHECKS)
def test_tiers(
    check: Callable[[Given], None], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Given(tmp_path, caplog, monkeypatch))
