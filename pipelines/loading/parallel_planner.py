"""`parallel=auto`: enumerate the parallel layouts of a model for a topology, estimate each, and choose one.

No weights are read. The time of a decode step is the longer of memory time and arithmetic time, plus link time. Prompts
are not counted.
"""

from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import DeviceConfig, ModelConfig, ParallelConfig, ParallelMode, Task
from conf.support.sizes import num_bytes
from kernels import build
from pipelines.engine.kv_cache import AUTO_SHARE, BLOCK_SIZE
from pipelines.jobs.report import print_columns
from pipelines.loading.device import prepare_device
from pipelines.loading.memory import step_bytes
from pipelines.loading.model_costs import model_costs
from pipelines.loading.model_source import resolve_model
from pipelines.loading.parallel_costs import Cost, ParallelCosts
from pipelines.loading.topology import Topology, find_topology, read_topology

ROW_TOKENS = 2048  # tokens of a row, prompt and answer, unless model.max_length is smaller
OVERLAP = 3  # exponent that joins memory and arithmetic time: 1 is their sum, infinity their maximum
NO_RANKS = "ranks need a CPU and the C++ kernels"
EQUAL = 0.95  # layouts above this share of the highest tokens/s count as equal: fewest ranks win


@dataclass(frozen=True)
class Workload:
    num_rows: int
    """Concurrent rows of all replicas together."""
    row_tokens: int
    block_size: int
    step_bytes: int
    """Bytes of the tensors that are live in a step."""
    itemsize: int
    """Bytes of a number that ranks exchange."""


@dataclass(frozen=True)
class Candidate:
    """A parallel layout and its estimate."""

    tp: int
    pp: int
    replicas: int
    stages: tuple[range, ...] = ()
    weight_bytes: int = 0
    """The largest weight bytes of a rank."""
    cache_tokens: int = 0
    """The cache tokens of one replica."""
    tokens_per_s: float = 0.0
    limit: str = ""
    """The bottleneck of the slowest stage, or the reason why the layout is impossible."""

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.replicas

    @property
    def is_possible(self) -> bool:
        return self.tokens_per_s > 0

    def __str__(self) -> str:
        parts = [("tp", self.tp), ("pp", self.pp), ("replicas", self.replicas)]
        return " ".join(f"{name}={number}" for name, number in parts if number > 1) or "single"


def planned(
    task: Task,
    model: ModelConfig,
    quant: QuantConfig,
    parallel: ParallelConfig,
    device: DeviceConfig,
    num_rows: int,
) -> ParallelConfig | None:
    """Return the chosen layout for `num_rows` concurrent rows. With `parallel.dry_run`, print all layouts and return None.

    Raises UserError if nothing fits, and if the chosen layout cannot be started from here.
    """
    candidates, topology, workload = plan_layouts(model, quant, parallel, device, num_rows)
    best = choose(candidates)
    if parallel.dry_run:
        print(f"{topology}\n{workload.num_rows:,} rows of {workload.row_tokens:,} tokens\n")
        print_columns(table(candidates, best))
        print(f"choice: {best or 'none, because nothing fits'}")
        return None
    if best is None:
        limit = [candidate.limit for candidate in candidates if candidate.limit != NO_RANKS][-1]
        raise UserError(f"parallel=auto: no parallel layout of this model fits here: {limit}: give quant=int4")
    print(f"parallel=auto: {best}")
    return _parallel(task, parallel, best)


def _parallel(task: Task, parallel: ParallelConfig, best: Candidate) -> ParallelConfig:
    if best.num_ranks == 1:
        return ParallelConfig(ParallelMode.single)
    if best.replicas > 1 and task is not Task.predict:
        raise UserError(f"parallel=auto chose {best}, which task={task.name} cannot run: give parallel=single")
    tp, pp = (number if number > 1 else None for number in (best.tp, best.pp))
    mode = ParallelMode.tp_pp if tp and pp else ParallelMode.tp if tp else ParallelMode.pp
    chosen = ParallelConfig(ParallelMode.ray if best.replicas > 1 else mode, best.replicas, tp, pp)
    return replace(chosen, sum=parallel.sum, experts=parallel.experts) if tp else chosen


def plan_layouts(
    model: ModelConfig, quant: QuantConfig, parallel: ParallelConfig, config: DeviceConfig, num_rows: int
) -> tuple[list[Candidate], Topology, Workload]:
    """Return all layouts of the model for `num_rows` concurrent rows, the topology and the workload.

    Raises UserError as loading an engine does.
    """
    source, path = resolve_model(model), parallel.topology
    if source.exported is not None:
        raise UserError(
            f"parallel=auto does not plan for {model.path}, which is exported: give the model that it was made of"
        )
    device = prepare_device(config) if path is None else torch.device("cpu")
    topology = None if path is None else read_topology(Path(path).expanduser())
    kind = topology.kind if topology else device.type
    block_size = config.block_size or BLOCK_SIZE[kind]
    packed, compresses = kind == "cpu", path is None
    plan, costs = model_costs(model, quant, parallel, source, block_size, packed, compresses)
    topology = topology or find_topology(device, plan.dtype)
    length = min(model.max_length or ROW_TOKENS, source.shape.context_length, ROW_TOKENS)
    num_tokens, vocab_size = config.max_batched_tokens, source.shape.vocab_size
    step = step_bytes(plan.max_layer_values, vocab_size, plan.dtype, num_tokens, num_rows)
    workload = Workload(num_rows, length, block_size, step, plan.dtype.itemsize)
    planner = _Planner(config, costs, topology, workload)
    has_ranks = path is not None or (device.type == "cpu" and build.library() is not None)
    candidates = [
        planner.candidate(tp, pp, replicas)
        if has_ranks or tp * pp == 1
        else Candidate(tp, pp, replicas, limit=NO_RANKS)
        for tp, pp, replicas in parallel_layouts(topology, num_rows)
    ]
    return candidates, topology, workload


def parallel_layouts(topology: Topology, num_rows: int) -> list[tuple[int, int, int]]:
    """Return (tp, pp, replicas) of every layout that leaves no device idle.

    For a single device, two ranks that share it are included.

    There are no more replicas than rows. The ranks of a stage are on one machine.
    """
    devices_per_machine, machines = topology.num_devices, topology.num_machines
    total = devices_per_machine * machines
    layouts = []
    for tp in (p for p in range(1, devices_per_machine + 1) if devices_per_machine % p == 0):
        for pp in (s for s in range(1, total // tp + 1) if total % (tp * s) == 0):
            layouts.append((tp, pp, min(total // (tp * pp), num_rows)))
    return layouts if total > 1 else [(1, 1, 1), (2, 1, 1), (1, 2, 1)]


def choose(candidates: list[Candidate]) -> Candidate | None:
    """Return the layout with the most tokens per second; None if none fits.

    Among nearly equal layouts the fewest ranks win, then the fewest ranks per replica.
    """
    most = max((candidate.tokens_per_s for candidate in candidates), default=0.0)
    good = [candidate for candidate in candidates if candidate.is_possible and candidate.tokens_per_s >= EQUAL * most]
    return min(
        good,
        key=lambda candidate: (candidate.num_ranks, candidate.tp * candidate.pp, candidate.pp, -candidate.tokens_per_s),
        default=None,
    )


class _Planner:
    """Estimates a layout."""

    def __init__(self, config: DeviceConfig, costs: ParallelCosts, topology: Topology, workload: Workload) -> None:
        self._config, self._costs, self._topology, self._work = config, costs, topology, workload

    def candidate(self, tp: int, pp: int, replicas: int) -> Candidate:
        try:
            stages = self._costs.stages(pp)
            costs = [[self._costs.rank(layers, tp, rank) for rank in range(tp)] for layers in stages]
        except UserError as error:  # more ranks than heads, or more stages than layers
            return Candidate(tp, pp, replicas, limit=str(error).partition(":")[0])
        ranks = [cost for stage in costs for cost in stage]
        num_blocks, limit = self._num_blocks(ranks, tp * pp)
        tokens = num_blocks * self._work.block_size
        candidate = Candidate(
            tp, pp, replicas, tuple(stages), max(cost.weight_bytes for cost in ranks), tokens, 0.0, limit
        )
        num_rows = min(-(-self._work.num_rows // replicas), tokens // self._work.row_tokens)
        if limit or not num_rows:
            return replace(candidate, limit=limit or f"the cache has no {self._work.row_tokens:,} tokens for a row")
        seconds, limit = self._step(costs, num_rows, tp)
        rows = min(self._work.num_rows, replicas * num_rows)
        return replace(candidate, tokens_per_s=rows / seconds, limit=limit)

    def _sharing(self, num_ranks: int) -> int:
        return -(-num_ranks // (self._topology.num_devices * self._topology.num_machines))

    def _num_blocks(self, ranks: list[Cost], num_ranks: int) -> tuple[int, str]:
        """Return the number of cache blocks that fit on every rank, and the reason if none fit."""
        usable = self._config.memory_fraction * self._topology.memory / self._sharing(num_ranks)
        free = [usable - cost.weight_bytes - self._work.step_bytes for cost in ranks]
        if min(free) <= 0:
            need = max(cost.weight_bytes for cost in ranks) + self._work.step_bytes
            return 0, f"a rank needs {need / 1e9:,.1f} GB without its cache, and may have {usable / 1e9:,.1f}"
        setting = self._config.kv_cache_memory
        if setting == "auto":
            room = [AUTO_SHARE * num_free_bytes for num_free_bytes in free]
        else:
            room = [
                min(num_free_bytes, num_bytes(setting, int(num_free_bytes * num_ranks)) / num_ranks)
                for num_free_bytes in free
            ]
        return int(
            min(num_free_bytes // max(1, cost.cache_bytes) for num_free_bytes, cost in zip(room, ranks, strict=True))
        ), ""

    def _step(self, costs: list[list[Cost]], num_rows: int, tp: int) -> tuple[float, str]:
        """Return the seconds in which all rows get a token, and the kind of work that limits the slowest stage.

        There are as many microbatches as stages, so that all stages are busy at once.
        """
        num_microbatches = min(len(costs), num_rows)
        microbatch_rows = -(-num_rows // num_microbatches)
        of_stages = [
            [self._rank(cost, microbatch_rows, tp, len(costs), num_microbatches) for cost in stage] for stage in costs
        ]
        stages = [max(ranks, key=_seconds) for ranks in of_stages]
        slowest = max(stages, key=_seconds)
        seconds = max(sum(map(_seconds, stages)), num_microbatches * _seconds(slowest))
        return seconds, max(slowest, key=slowest.__getitem__)

    def _rank(self, cost: Cost, num_rows: int, tp: int, pp: int, num_microbatches: int) -> dict[str, float]:
        topology, work, sharing = self._topology, self._work, self._sharing(tp * pp)
        share = self._costs.active_share(num_rows)
        bandwidth, flops = topology.bandwidth / min(sharing, tp * num_microbatches), topology.flops(num_rows) / sharing
        if sharing > 1:  # each rank has at most half of the cores
            bandwidth = min(bandwidth, topology.half_bandwidth)
        link = self._hop(tp * pp, num_rows) if pp > 1 else 0.0
        if tp > 1:
            received = num_rows * cost.gathered * work.itemsize * (tp - 1) / tp
            link += cost.num_gathers * topology.link.latency_s + received / topology.link.bandwidth
        return {
            "weights": (cost.read_bytes + share * cost.expert_bytes) / bandwidth,
            "cache": num_rows * work.row_tokens / work.block_size * cost.cache_bytes / bandwidth,
            "arithmetic": 2 * num_rows * (cost.macs + self._costs.active_share(1) * cost.expert_macs) / flops,
            "link": link,
        }

    def _hop(self, num_ranks: int, num_rows: int) -> float:
        is_far = num_ranks > self._topology.num_devices
        link = self._topology.network if is_far and self._topology.network else self._topology.link
        return link.seconds(num_rows * self._costs.hidden_size * self._work.itemsize)


def _seconds(times: dict[str, float]) -> float:
    """Return a rank's seconds: memory and arithmetic overlap, the links follow.

    The overlap is a power sum, a smooth maximum: if both take equally long, each sometimes waits for the other.
    """
    memory, arithmetic = times["weights"] + times["cache"], times["arithmetic"]
    return float((memory**OVERLAP + arithmetic**OVERLAP) ** (1 / OVERLAP) + times["link"])


def table(candidates: list[Candidate], best: Candidate | None) -> dict[str, list[str]]:
    """Return a table with a row for each candidate, with the choice marked."""

    def column(cell: str, known: list[bool], of: list[str]) -> list[str]:
        return [value if is_known else cell for value, is_known in zip(of, known, strict=True)]

    known = [bool(candidate.stages) for candidate in candidates]
    possible = [candidate.is_possible for candidate in candidates]
    return {
        "": ["->" if candidate is best else "" for candidate in candidates],
        "tp": [str(candidate.tp) for candidate in candidates],
        "pp": [str(candidate.pp) for candidate in candidates],
        "replicas": [str(candidate.replicas) for candidate in candidates],
        "layers of the stages": column("-", known, [_layers(candidate.stages) for candidate in candidates]),
        "weights of a rank (GB)": column(
            "-", known, [f"{candidate.weight_bytes / 1e9:,.3f}" for candidate in candidates]
        ),
        "cache (tokens)": column("-", known, [f"{candidate.cache_tokens:,}" for candidate in candidates]),
        "tokens/s": column("-", possible, [f"{candidate.tokens_per_s:,.1f}" for candidate in candidates]),
        "limit": [candidate.limit for candidate in candidates],
    }


def _layers(stages: tuple[range, ...]) -> str:
    """Return the layer counts of the stages: `8 8 7`, or `14x8 2x7` for 14 stages of 8 layers and 2 stages of 7."""
    runs = [(len([*group]), size) for size, group in groupby(map(len, stages))]
    return " ".join(f"{number}x{size}" if number > 1 else str(size) for number, size in runs)
