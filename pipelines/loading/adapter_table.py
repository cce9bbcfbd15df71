"""Make the adapter table of a loaded model, and load the adapters of its options."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import UserError
from pipelines.engine.adapters import AdapterChange, Adapters, LoadAdapter
from pipelines.loading.memory import explained_out_of_memory
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.rank_operations import LoadedAdapter
from quantization.smoothing_record import read_folds, smoothed_by

if TYPE_CHECKING:
    from pipelines.loading.driver import Driver


def make_adapters(plan: ModelPlan, on_change: Callable[[AdapterChange], None] | None = None) -> Adapters:
    """Return the empty adapter table of the loaded model. `on_change`: as in `Adapters`."""
    checkpoint = plan.source.checkpoint
    smoothing, folds = smoothed_by(checkpoint.config, checkpoint.path), read_folds(checkpoint.path, plan.model)
    base, num_slots = plan.whole_files or plan.files, plan.options.max_adapters
    return Adapters(plan.model, plan.dtype, plan.device, num_slots, folds, smoothing, base, on_change)


def load_adapters(plan: ModelPlan, driver: "Driver | None") -> Adapters:
    adapters = make_adapters(plan) if driver is None else make_adapters(plan, driver.change_adapters)
    for name, folder in (plan.options.adapters or {}).items():
        adapters.load(name, Path(folder).expanduser(), in_use=())
    return adapters


def load_as_rank_0(adapters: Adapters, change: LoadAdapter, rank: str) -> LoadedAdapter:
    """Load an adapter on a worker, whose name is `rank`. An error does not end the worker: rank 0 unloads the adapter."""
    try:
        with explained_out_of_memory():
            adapters.repeat(change, rank)
    except (UserError, OSError) as error:
        return LoadedAdapter(str(error) if str(error).startswith(rank) else f"{rank}: {error}")
    return LoadedAdapter(None)
