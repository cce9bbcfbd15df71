"""Measure the memory bandwidth of this machine, and the share of it that a decode step reaches."""

import itertools
import os
import time
from pathlib import Path

import torch

BANDWIDTH_BYTES = 2**29  # far larger than any cache
CPUS = Path("/sys/devices/system/cpu")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def memory_bandwidth(device: torch.device, num_threads: int | None = None) -> float:
    """Return the bandwidth in bytes per second, the best of five passes over half a GiB.

    A CPU pass reads the buffer. A GPU pass copies: half of the bytes are read, half are written. `num_threads`: CPU
    threads that read; None: all.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        seconds = _copies(device) if device.type == "cuda" else _reads()
    finally:
        torch.set_num_threads(before)
    return BANDWIDTH_BYTES / min(seconds[1:])


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last-level caches that this process may use; 0 if the system does not report them."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes: dict[tuple[int, str], int] = {}  # by cache level and the list of CPUs that share the cache
    try:
        for cpu in os.sched_getaffinity(0):
            for cache in CPUS.glob(f"cpu{cpu}/cache/index*"):
                texts = ((cache / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
                level, shared, size = texts
                sizes[int(level), shared] = int(size[:-1]) * UNITS[size[-1]]
    except (OSError, ValueError, KeyError, IndexError, AttributeError):  # a system without these files
        return 0
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def share_of_bandwidth(read_bytes: float, seconds: float, bandwidth: float, cache: int) -> tuple[float | None, str]:
    """Return the share of `bandwidth` that `read_bytes` in `seconds` reach, or None and the reason why it is
    unknown.
    """
    if read_bytes <= cache:
        return None, f"a step reads {read_bytes / 1e6:,.1f} MB, which fit the cache of {cache / 1e6:,.0f} MB"
    share = read_bytes / seconds / bandwidth
    if share > 1:
        return (
            None,
            "a step is faster than the memory was when it was measured: a part is in the cache, or the machine was busy",
        )
    return share, ""


def _reads() -> list[float]:
    data = torch.ones(BANDWIDTH_BYTES // 4)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start)
    return seconds


def _copies(device: torch.device) -> list[float]:
    source, target = torch.ones(2, BANDWIDTH_BYTES // 8, device=device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(7)]
    marks[0].record()
    for mark in marks[1:]:
        target.copy_(source)
        mark.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]
