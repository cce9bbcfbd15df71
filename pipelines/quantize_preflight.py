"""`quantize.dry_run=true`: what would be quantised, and about how much memory and time that takes."""

import math
import time
from collections import Counter

import torch

from conf.quantization import QuantMethod
from conf.schema import RunConfig, Weights
from models.linear_layers import linear_layers
from models.outline import outline
from models.registry import find_architecture
from models.weights import DTYPES
from pipelines.assembly import find_and_open
from pipelines.report import print_table
from quantization.export import export_of
from quantization.scheme import LinearScheme

PASSES = 2  # of the calibration tokens through each layer: to observe, and to go on
GPTQ_PRODUCTS = 3  # matrix products [I, I] x [I, O + I] that GPTQ comes to for a layer


def print_preflight(run: RunConfig) -> None:
    """Raises UserError as quantising would, for what can be told from the config and the layers' shapes."""
    checkpoint = find_and_open(run.model)
    architecture = find_architecture(checkpoint.config)
    bound = None if run.model.weights is Weights.random else checkpoint
    model = outline(architecture, architecture.read_config(checkpoint.config), bound)
    layers, schemes = linear_layers(model), export_of(model, run.quant, run.export.format).schemes
    itemsize = DTYPES.get(run.model.dtype.name, torch.float16).itemsize
    sizes = {name: layers[name].shape[0] * layers[name].shape[1] for name in schemes}
    before = sum(parameter.numel() for parameter in model.parameters()) * itemsize
    saved = sum(size * itemsize - _bytes(size, schemes[name]) for name, size in sizes.items())
    tokens = run.calibrate.num_samples * run.calibrate.sequence_length
    operations = 2 * PASSES * tokens * sum(math.prod(layer.shape) for layer in layers.values())
    if run.quant.method is QuantMethod.gptq:
        shapes = [layers[name].shape for name in schemes]
        operations += sum(2 * GPTQ_PRODUCTS * i * i * (o + i) + 2 * tokens * i * i for o, i in shapes)
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
            ("time", f"about {operations / _operations_per_s():,.0f} s on this machine"),
        ]
    )


def _bytes(size: int, scheme: LinearScheme) -> float:
    """Of the codes; scales are little."""
    return size * scheme.weights.bits / 8


def _operations_per_s() -> float:
    """Of a float32 matrix product, measured now."""
    a = torch.rand(512, 1024)
    b = torch.rand(1024, 1024)
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < 0.2:
        a @ b
        count += 1
    return 2 * 512 * 1024 * 1024 * count / elapsed
