"""Stage 4 of loading an engine: load the weights of a planned model, and fuse the layers that run in one call."""

from collections.abc import Callable
from functools import partial

from conf.errors import UserError
from models.exported.model import ExportedLM
from models.linear_layers import fuse_layers
from models.weights import initialise_randomly, load_weights
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.packed_cache import load_packed
from quantization.plan import AUTO_NEEDS_INTEGERS


def load_planned(plan: ModelPlan, on_bytes: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Load the planned model's weights (random, kept packed, or from the files), then fuse its packed layers."""
    model, dtype, device = plan.model, plan.dtype, plan.device
    read = partial(load_weights, model, plan.files, plan.ignored_tensors, dtype, device, on_bytes)
    if isinstance(model, ExportedLM):
        model.load()
        if model.quantize_rows is not None and not model.graph.num_quantized:
            raise UserError(AUTO_NEEDS_INTEGERS)
        if plan.options.adapters:
            _ = model.adapted_graph  # a damaged adapter graph fails here, not in a step
        return
    if not plan.files:
        initialise_randomly(model, dtype, device)
    elif plan.options.keep_packed:
        load_packed(plan, read)
    else:
        read()
    if plan.packed:
        fuse_layers(model, device)
