"""Make the adapter table of a loaded model, and load the adapters of its options."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.engine.adapters import AdapterChange, Adapters
from pipelines.loading.model_plan import ModelPlan
from quantization.smoothing_record import read_folds, smoothed_by

if TYPE_CHECKING:
    from pipelines.loading.driver import Driver


def make_adapters(plan: ModelPlan, on_change: Callable[[AdapterChange], None] = lambda change: None) -> Adapters:
    """Return the empty adapter table of the loaded model. `on_change`: called with each change, as in `Adapters`."""
    checkpoint = plan.source.checkpoint
    smoothing, folds = smoothed_by(checkpoint.config, checkpoint.path), read_folds(checkpoint.path, plan.model)
    base, num_slots = plan.whole_files or plan.files, plan.options.max_adapters
    return Adapters(plan.model, plan.dtype, plan.device, num_slots, folds, smoothing, base, on_change)


def load_adapters(plan: ModelPlan, driver: "Driver | None") -> Adapters:
    adapters = make_adapters(plan) if driver is None else make_adapters(plan, driver.workers.tell)
    for name, folder in (plan.options.adapters or {}).items():
        adapters.load(name, Path(folder).expanduser(), in_use=())
    return adapters
