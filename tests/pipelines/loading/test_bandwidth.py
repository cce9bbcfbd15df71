"""Caches are counted as the system describes them; a meaningless share of the bandwidth is None, with the reason."""

import os
from pathlib import Path

import pytest
import torch

from pipelines.loading import bandwidth
from pipelines.loading.bandwidth import cache_bytes, share_of_bandwidth

CPU = torch.device("cpu")


def describe(folder: Path, cpu: int, index: int, level: str, size: str, shared: str) -> None:
    cache = folder / f"cpu{cpu}" / "cache" / f"index{index}"
    cache.mkdir(parents=True)
    for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
        (cache / name).write_text(f"{text}\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four processors, of which the process may use three; their caches are unknown at first."""
    monkeypatch.setattr(bandwidth, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    return tmp_path


def test_the_last_levels_that_the_process_may_use_are_added_up(system: Path) -> None:
    for cpu in range(4):
        describe(system, cpu, 0, "1", "48K", str(cpu))
        describe(system, cpu, 3, "3", "32M" if cpu < 2 else "16M", "0-1" if cpu < 2 else str(cpu))
    # one shared by two processors, one of the third; the fourth processor's cache is not ours
    assert cache_bytes(CPU) == (32 + 16) * 2**20


def test_a_description_that_is_not_understood_is_not_a_cache(system: Path) -> None:
    for index, (level, size) in enumerate([("3", "32X"), ("3", ""), ("three", "32M")]):
        describe(system, 0, index, level, size, "0")
        assert cache_bytes(CPU) == 0, (level, size)


def test_a_system_that_says_nothing_has_no_cache(system: Path) -> None:
    assert cache_bytes(CPU) == 0


def test_a_share_is_bytes_by_seconds_by_bandwidth() -> None:
    assert share_of_bandwidth(6e9, 0.5, 24e9, 10**6) == (0.5, "")


def test_a_share_that_would_say_nothing_is_none() -> None:
    assert share_of_bandwidth(1e6, 1, 1e9, 2 * 10**6) == (None, "a step reads 1.0 MB, which fit the cache of 2 MB")
    share, reason = share_of_bandwidth(3e9, 1, 2e9, 10**6)
    assert share is None
    assert reason.startswith("a step is faster than the memory was when it was measured")
