"""What is going to be quantised, and about how much memory and time that takes, which `quantize.dry_run=true` only says."""

from collections import Counter
from dataclasses import dataclass

import torch

from conf.schema import DType, RunConfig, Weights
from models.causal_lm import CausalLM
from models.linear_layers import linear_specs
from models.outline import outline
from models.registry import find_architecture
from models.weights import DTYPES, stored_dtype
from pipelines.assembly import find_and_open, prepared_device
from pipelines.quantize_estimate import expected_seconds
from pipelines.report import print_table
from quantization.file_layout import file_layout
from quantization.scheme import LinearScheme


@dataclass(frozen=True)
class Preflight:
    model: CausalLM
    """On the meta device."""
    schemes: dict[str, LinearScheme]
    """By layer; of the others there are none."""
    dtype: torch.dtype
    duration: str
    """What it is expected to take on this machine: `about 8 s`."""


def preflight(run: RunConfig) -> Preflight:
    """Raises UserError as quantising would, for what can be told from the config, the device and the layers' shapes."""
    device = prepared_device(run.device)  # whose threads the estimate is measured with
    checkpoint = find_and_open(run.model)
    architecture = find_architecture(checkpoint.config)
    bound = None if run.model.weights is Weights.random else checkpoint
    model = outline(architecture, architecture.read_config(checkpoint.config), bound)
    schemes = file_layout(model, run.quant, run.quantize.format).schemes
    wanted = run.model.dtype
    names_one = checkpoint.config.raw("torch_dtype") or checkpoint.config.raw("dtype")
    files = [] if names_one or wanted is not DType.auto else checkpoint.open_weights({})
    dtype = DTYPES[stored_dtype(checkpoint.config, files) if wanted is DType.auto else wanted.name]
    if device.type != "cpu":
        return Preflight(model, schemes, dtype, "a time that is only known on a CPU")
    stored = {name: scheme.weights.bits / 8 for name, scheme in schemes.items()}
    seconds = expected_seconds(run, model, schemes, dtype, stored)
    return Preflight(model, schemes, dtype, f"about {seconds:,.0f} s")


def print_preflight(run: RunConfig) -> None:
    """Raises UserError as `preflight` does."""
    found = preflight(run)
    layers, schemes, itemsize = linear_specs(found.model), found.schemes, found.dtype.itemsize
    sizes = {name: layers[name].shape[0] * layers[name].shape[1] for name in schemes}
    before = sum(parameter.numel() for parameter in found.model.parameters()) * itemsize
    saved = sum(size * (itemsize - schemes[name].weights.bits / 8) for name, size in sizes.items())  # scales are little
    largest = max(sizes.values(), default=0)
    counts = Counter(str(scheme) for scheme in schemes.values())
    cache = [("KV cache", f"{run.quant.kv_cache.name}, a scale for each head")] if run.quant.has_static_kv_cache else []
    print_table(
        [
            *((f"{count} layers", scheme) for scheme, count in counts.items()),
            *cache,
            ("stay floats", ", ".join(sorted(layers.keys() - schemes.keys())) or "no linear layer"),
            ("weights", f"{before / 1e6:,.1f} MB before, {(before - saved) / 1e6:,.1f} MB after"),
            ("memory", f"about {(before + 3 * 4 * largest) / 1e6:,.0f} MB for weights while it runs"),
            ("time", f"{found.duration} on this machine"),
        ]
    )
