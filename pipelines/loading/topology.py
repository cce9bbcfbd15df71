"""The machines for a sharded model: read from a YAML file, or measured on this machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import yaml

from conf.errors import UserError
from conf.support.sizes import num_bytes
from kernels.linear import matmul, pack
from models.config import ConfigReader
from pipelines.engine.kv_cache import free_memory
from pipelines.loading.bandwidth import memory_bandwidth

NUMA_NODES = Path("/sys/devices/system/node")
PRODUCT = 2048  # inputs and outputs of the matrix product that measures arithmetic: its weight fits the cache
MAX_ROWS = 128  # maximum rows of the product: enough for the peak of a CPU
SHARED_MEMORY_LATENCY_S = 2e-6  # of a barrier between two processes
SHARED_MEMORY_COPIES = 3  # reads and writes per number that one process sends to another
GPU_LATENCY_S, GPU_BANDWIDTH = 1e-5, 2.5e10  # defaults without a topology file: NCCL over PCIe 4


@dataclass(frozen=True)
class Link:
    """A link. Sending n bytes takes `latency_s` + n / `bandwidth` seconds."""

    latency_s: float
    bandwidth: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Topology:
    """Identical machines, each with identical devices: GPUs, or NUMA nodes with their cores."""

    kind: str
    """cpu or cuda."""
    num_machines: int
    num_devices: int
    """Per machine."""
    memory: int
    """Usable bytes of a device."""
    bandwidth: float
    """Bytes per second of a device's memory."""
    half_bandwidth: float
    """Bytes per second that half of a device's cores read while the other half is idle."""
    flops: Callable[[int], float]
    """Maps the rows of a product to multiplications and additions per second of a device, in the model's dtype."""
    link: Link
    """Between the devices of a machine."""
    network: Link | None
    """Between machines; None for a single machine."""

    def __str__(self) -> str:
        name = {"cpu": "NUMA node", "cuda": "GPU"}[self.kind] + "s" * (self.num_devices > 1)
        machines = f"{self.num_machines} machines with " if self.num_machines > 1 else ""
        device_text = f"{self.memory / 1e9:,.1f} GB at {self.bandwidth / 1e9:,.0f} GB/s, {self.flops(MAX_ROWS) / 1e12:,.1f} TFLOP/s"
        return f"{machines}{self.num_devices} {name} of {device_text}"


def read_topology(path: Path) -> Topology:
    """Read a file like the files in pipelines/topologies.

    Raises UserError for a missing, unknown or impossible value.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"parallel.topology={path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(
            f"parallel.topology={path} is no YAML of names and values, such as those in pipelines/topologies"
        )
    reader = ConfigReader(values, str(path))
    num_machines = reader.count("machines", 1, bits=16)
    link = _read_link(reader, "link")
    if link is None:
        raise UserError(f"{path}: link is missing: give {{latency_us: 2, bandwidth: 60GB}}")
    network = _read_link(reader, "network")
    if (network is None) != (num_machines == 1):
        raise UserError(f"{path}: network is between machines: give it for several, and not for one")
    bandwidth, flops = _size(reader, "bandwidth", path), 1e12 * reader.positive("tflops")
    topology = Topology(
        reader.expect("kind", ("cpu", "cuda"), None),
        num_machines,
        reader.count("devices", bits=16),
        _size(reader, "memory", path),
        bandwidth,
        bandwidth,
        lambda num_rows: flops,
        link,
        network,
    )
    _refuse_unread(reader, path)
    return topology


def _read_link(reader: ConfigReader, key: str) -> Link | None:
    section = reader.section(key)
    if section is None:
        return None
    link = Link(section.positive("latency_us") / 1e6, _size(section, "bandwidth", key))
    _refuse_unread(section, key)
    return link


def _size(reader: ConfigReader, key: str, where: Path | str) -> int:
    size = num_bytes(reader.require(key, str))
    if size < 1:
        raise UserError(f"{where}: {key}={reader.raw(key)} is no size: give one such as 80GB or 512GiB")
    return size


def _refuse_unread(reader: ConfigReader, where: Path | str) -> None:
    if unread := reader.unread():
        raise UserError(f"{where}: {unread[0]} is not known here: the files in pipelines/topologies have all keys")


def find_topology(device: torch.device, dtype: torch.dtype) -> Topology:
    """Return this machine's topology: free memory is read; bandwidth and arithmetic are measured in less than a
    second.
    """
    bandwidth, free = memory_bandwidth(device), free_memory(device, 1.0)
    measured = partial(_measured_flops, device, dtype)
    if device.type == "cuda":
        link, number = Link(GPU_LATENCY_S, GPU_BANDWIDTH), torch.cuda.device_count()
        return Topology("cuda", 1, number, free, bandwidth, bandwidth, cache(measured), link, None)
    number = max(1, len([*NUMA_NODES.glob("node[0-9]*")]))
    of_half = min(bandwidth, memory_bandwidth(device, max(1, torch.get_num_threads() // 2)))
    flops = cache(lambda num_rows: measured(num_rows) / number)
    link = Link(SHARED_MEMORY_LATENCY_S, bandwidth / number / SHARED_MEMORY_COPIES)
    return Topology("cpu", 1, number, free // number, bandwidth / number, of_half / number, flops, link, None)


def _measured_flops(device: torch.device, dtype: torch.dtype, num_rows: int) -> float:
    """Return a device's FLOP/s in a float product.

    A CPU kernel is measured with `num_rows`: with few rows, unpacking the weight dominates. A GPU is measured at its
    peak.
    """
    weight = torch.randn(PRODUCT, PRODUCT).to(device, dtype)
    rows = torch.randn(PRODUCT if device.type == "cuda" else min(num_rows, MAX_ROWS), PRODUCT).to(device, dtype)
    product = partial(matmul, rows, pack(weight)) if device.type == "cpu" else partial(torch.matmul, rows, weight)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        product().flatten()[0].item()
        seconds.append(time.perf_counter() - start)
    return 2 * rows.numel() * PRODUCT / min(seconds[1:])
