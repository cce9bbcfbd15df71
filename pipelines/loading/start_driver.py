"""Start the ranks of a run: find or start the worker processes, divide the CPUs, and tell each worker what to load."""

import os
import socket
from dataclasses import replace

import torch

from conf.errors import UserError
from conf.schema import Backend, DeviceConfig, DeviceType, ParallelConfig
from kernels import build
from kernels.threads import set_threads, use_cores
from pipelines.loading.driver import Driver
from pipelines.loading.fingerprint import common_fingerprint
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.model_to_load import ModelToLoad
from pipelines.loading.shard_plan import check_plan
from pipelines.ranks.control import Worker, Workers
from pipelines.ranks.launch import (
    Joined,
    Rank,
    backend_of,
    bound,
    check_gpus,
    cores_of_ranks,
    degrees,
    joined,
    spawn,
)
from pipelines.ranks.rank_context import driver_context, layout_of
from pipelines.ranks.rendezvous import await_ranks


def start_driver(full_plan: ModelPlan, parallel: ParallelConfig, options: DeviceConfig) -> Driver:
    """Start the worker ranks, or wait for the ranks that a launcher started. Tell each worker what to load.

    `full_plan`: the plan of the unsharded model. Raises UserError if the ranks are not available.
    """
    num_gpus = torch.cuda.device_count() if full_plan.device.type == "cuda" else 0
    library = build.library()
    if library is None and not num_gpus:
        problem = "needs the C++ kernels, which are off: give them, or parallel=single"
        raise UserError(f"parallel={parallel.mode.name} {problem}")
    launched = _launched()
    (tp, pp), cpus = degrees(parallel, launched), os.sched_getaffinity(0)
    backend = backend_of(parallel.backend, launched, tp, num_gpus)
    if launched is None:
        check_plan(full_plan, layout_of(0, tp, pp, parallel))
        if backend is Backend.nccl:
            check_gpus(tp * pp, num_gpus)
    ranks = spawn(tp * pp) if launched is None else await_ranks(launched)
    cores = _cores(launched, ranks, cpus)
    start = {
        "tp": tp,
        "pp": pp,
        "num_local": launched.num_local if launched else tp * pp,
        "num_gpus": num_gpus,
        "backend": backend.name,
        **_model_to_load(full_plan, parallel, options, backend, launched).message(),
    }
    starts = [
        start | {"rank": rank.rank, "local_rank": rank.rank, "name": rank.name, "cores": cores[rank.rank]}
        for rank in ranks
    ]
    num_cpus = len(cpus.union(*(rank.cpus for rank in ranks)))
    context = driver_context(ranks, starts, parallel, library, spins=num_cpus >= tp * pp)
    use_cores(cores[0] or (launched.cores(cpus) if launched else cpus))
    if library is not None:
        torch.set_num_threads(options.threads or library.get_threads())
    set_threads(options.threads)
    workers = [Worker(rank.rank, rank.name, rank.channel, rank.process) for rank in ranks]
    return Driver(Workers(workers, context, parallel.heartbeat_s), cpus)


def _model_to_load(
    full_plan: ModelPlan, parallel: ParallelConfig, options: DeviceConfig, backend: Backend, launched: Joined | None
) -> ModelToLoad:
    # If all ranks are on this machine, rank 0 has verified the files for all of them.
    is_near = launched is None or launched.address is None
    return ModelToLoad(
        model=replace(full_plan.options, verify=full_plan.options.verify and not is_near),
        quant=full_plan.quant,
        parallel=parallel,
        device=replace(
            options, type=DeviceType[full_plan.device.type]
        ),  # replaces auto, so that all ranks use one type
        head=full_plan.source.architecture.head,
        predicts_ahead=full_plan.source.shape.capabilities.predicts_ahead,
        packed=full_plan.packed,
        common=None if backend is Backend.shared_memory else common_fingerprint(full_plan.source.checkpoint.path),
    )


def _launched() -> Joined | None:
    """Return rank 0's place in a launcher's job; None without a launcher.

    Raises UserError if the launcher started this process as another rank.
    """
    launched = joined(os.environ)
    if launched is not None and launched.rank > 0:
        problem = f"{launched.launcher} has started this script {launched.size} times, but a model in Python starts its ranks itself"
        raise UserError(f"{problem}: run it without {launched.launcher}")
    return launched


def _cores(launched: Joined | None, ranks: list[Rank], cpus: set[int]) -> list[list[int] | None]:
    """Return the CPUs of each rank, rank 0 first. Rank 0 may use `cpus`.

    A rank gets None if the launcher has not bound it to CPUs of its own. Ranks of one machine then divide its CPUs.
    """
    if launched is None:
        return [*map(sorted, cores_of_ranks(1 + len(ranks), cpus))]
    host = None if launched.address is None else socket.gethostname()
    everyone = [(host, cpus), *((rank.host, rank.cpus) for rank in ranks)]
    return [
        sorted(rank_cpus) if is_alone else None
        for (_, rank_cpus), is_alone in zip(everyone, bound(everyone), strict=True)
    ]
