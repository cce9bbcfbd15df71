"""A process that loads one rank's part and reports the bytes: `python -m tests.helpers.rank_load RUN TP PP RANK`.

No other process reads the checkpoint meanwhile, so all bytes that are read from its files are this rank's. RUN is a
RunConfig as JSON.
"""

import json
import sys

from conf.compose import from_json
from conf.schema import RunConfig
from kernels import build
from models.weights import module_bytes
from pipelines.jobs.report import peak_memory_bytes, reset_peak_memory
from pipelines.loading.device import prepare_device
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from pipelines.loading.shard_plan import shard_plan
from pipelines.loading.weight_loading import load_planned
from pipelines.ranks.rank_context import create_memory, layout_of, shared_memory_context


def main() -> None:
    run = from_json(RunConfig, json.loads(sys.argv[1]))
    tp, pp, rank = map(int, sys.argv[2:])
    library = build.library()
    assert library is not None
    place = shared_memory_context(
        library, create_memory(library, tp, pp), layout_of(rank, tp, pp, run.parallel), spins=False
    )
    device = prepare_device(run.device)
    plan = plan_model(run.model, run.quant, resolve_model(run.model), device, packed=True)
    plan = shard_plan(plan, place.parallel_layout, place.group, place.neighbours)
    weight_bytes = sum(module_bytes(plan.model, plan.dtype).values())
    reset_peak_memory()
    before = peak_memory_bytes(device)
    load_planned(plan)
    print(json.dumps({"weight_bytes": weight_bytes, "peak_bytes": peak_memory_bytes(device) - before}))


if __name__ == "__main__":
    main()
