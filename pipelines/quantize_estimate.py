"""How long a calibration is going to take: operations and weights are counted, and what each costs is measured on a small layer.

T tokens, O output channels, I input channels.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from conf.quantization import QuantMethod
from conf.schema import RunConfig
from models.causal_lm import CausalLM
from models.layers.linear import Linear
from models.layers.moe import Experts
from models.linear_layers import linear_specs
from quantization.awq import NUM_CLIPS, NUM_RATIOS
from quantization.calibration import NUM_SAMPLES, PROBE_TOKENS, fast_method
from quantization.fold import multiply_inputs
from quantization.gptq import BLOCK_SIZE, gptq
from quantization.layouts.base import StoredWeight
from quantization.plan import place_quantized
from quantization.quantizer import is_sequential
from quantization.scheme import LinearScheme
from quantization.smoothquant import smooth_scales
from quantization.weight_format import quantize

MOST_CHANNELS = 2048  # of the small layer: its weights leave the caches, as those of large models do
START_S = 3.0  # the tokenizer's imports, and the built-in texts
CHANNELS = 128  # a multiple of these, which groups divide
PROBES = 3  # outputs of a layer: before and after its folds, and to go on
GPTQ_OUTPUTS = 1024


@dataclass(frozen=True)
class Costs:
    """Seconds, measured now, in as many threads as a run has."""

    read: float
    """Of a weight, until it is known to be finite."""
    prepare: float
    """Of a weight, to be multiplied by fast."""
    product: float
    """Of an operation of such products, of many tokens."""
    probe: float
    """Of an operation of products of a few tokens."""
    fold: float
    """Of a weight, to smooth it."""
    quantize: float
    """Of a weight, to codes."""
    place: float
    """Of a weight, from codes to what the kernels read."""
    coded_product: float
    """Of an operation with quantised weights."""
    wide_product: float
    """Of an operation in float32."""
    keep: float
    """Of a byte that is written, hashed and read again."""


def expected_seconds(
    run: RunConfig, model: CausalLM, schemes: dict[str, LinearScheme], dtype: torch.dtype, itemsizes: dict[str, float]
) -> float:
    """To calibrate a (meta) model and keep it. `itemsizes` are the bytes of a stored weight, by layer."""
    layers, tokens = linear_specs(model), run.calibrate.num_tokens
    sizes = {name: layer.shape[0] * layer.shape[1] for name, layer in layers.items()}
    inner = {name: size for name, size in sizes.items() if model.get_submodule(name) is not model.head}
    shares = _shares(model)
    multiplied = sum(size * shares.get(name, 1.0) for name, size in inner.items())
    coded = sum(size for name, size in sizes.items() if name in schemes)
    scheme = next(iter(schemes.values()), None)
    widest = max(max(layer.shape[:2]) for name, layer in layers.items() if name in inner)
    size = min(MOST_CHANNELS, -(-widest // CHANNELS) * CHANNELS)
    cost = _measure(scheme, dtype, size, min(tokens, NUM_SAMPLES))
    method = run.quant.method
    seconds = START_S + sum(parameter.numel() for parameter in model.parameters()) * cost.read
    if schemes or not is_sequential(run.quant):
        seconds += sum(inner.values()) * cost.prepare + 2 * tokens * multiplied * cost.product
    if is_sequential(run.quant):
        seconds += 2 * tokens * multiplied * cost.coded_product
    if method in (QuantMethod.smoothquant, QuantMethod.awq):
        seconds += 2 * PROBES * PROBE_TOKENS * multiplied * cost.probe + coded * cost.fold
    if method is QuantMethod.awq:
        seconds += NUM_RATIOS * coded * (2 * cost.quantize + cost.fold + 2 * NUM_SAMPLES * cost.wide_product)
    if run.quant.auto_clip:
        seconds += NUM_CLIPS * coded * (2 * cost.quantize + 2 * NUM_SAMPLES * cost.wide_product)
    if method is QuantMethod.gptq and scheme is not None:
        shapes = [layers[name].shape for name in schemes]
        seconds += _gptq_seconds(shapes, tokens, scheme, cost)
    seconds += coded * (cost.quantize + cost.place)
    return seconds + sum(sizes[name] * itemsizes[name] for name in schemes) * cost.keep


def _shares(model: CausalLM) -> dict[str, float]:
    """Of the tokens, that reach an expert's layers."""
    mixtures = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    return {
        f"{name}.{own}": mixture.active_share(1) for name, mixture in mixtures.items() for own in linear_specs(mixture)
    }


def _gptq_seconds(shapes: list[tuple[int, int]], tokens: int, scheme: LinearScheme, cost: Costs) -> float:
    """Hessians, their factors, the errors that are passed on from block to block, and rounding within blocks."""
    weight, hessian = torch.randn(GPTQ_OUTPUTS, BLOCK_SIZE), torch.eye(BLOCK_SIZE)
    block = _seconds(lambda: gptq(weight, hessian, scheme.weights)) / GPTQ_OUTPUTS  # of an output
    operations = sum(2 * tokens * i * i + i * i * i + 2 * o * i * i / 2 for o, i in shapes)
    return operations * cost.wide_product + sum(o * i / BLOCK_SIZE for o, i in shapes) * block


@torch.inference_mode()
def _measure(scheme: LinearScheme | None, dtype: torch.dtype, size: int, num_tokens: int) -> Costs:
    """On a layer [O, I] of `size` channels both ways."""
    layer = Linear(size, size, bias=False)
    layer.load({"weight": torch.randn(size, size)}, dtype, torch.device("cpu"))
    own = layer.method
    x, weights = torch.randn(num_tokens, size).to(dtype), size * size
    floats = layer.weight
    wide, wide_x = floats.float(), x[:NUM_SAMPLES].float()
    operations, wide_operations = 2 * weights * num_tokens, 2 * weights * len(wide_x)
    probe = _seconds(lambda: own.apply(x[:PROBE_TOKENS], None)) / (2 * weights * min(PROBE_TOKENS, num_tokens))
    read = _seconds(lambda: (floats.clone().amax(), floats.sum(dtype=torch.float32))) / weights
    prepare = _seconds(lambda: fast_method(layer)) / weights
    fast = fast_method(layer)
    product = _seconds(lambda: fast.apply(x, None)) / operations
    scales = smooth_scales(torch.rand(size), [wide])
    fold = _seconds(lambda: (smooth_scales(scales, [wide]), multiply_inputs(wide, scales).to(dtype))) / weights
    quantized = place = coded_product = 0.0
    if scheme is not None:
        stored = StoredWeight(quantize(wide, scheme.weights), torch.tensor(0.05))
        quantized = _seconds(lambda: quantize(floats.float(), scheme.weights)) / weights

        def put() -> None:
            layer.method = own
            place_quantized(layer, scheme, stored)

        place = _seconds(put) / weights
        coded_product = _seconds(lambda: layer(x, None)) / operations
    wide_product = _seconds(lambda: wide_x @ wide) / wide_operations
    content = floats.view(torch.uint8).numpy().data
    keep = 2 * _seconds(lambda: hashlib.sha256(content)) / len(content.cast("B")) + 1e-9
    return Costs(read, prepare, product, probe, fold, quantized, place, coded_product or product, wide_product, keep)


def _seconds(work: Callable[[], object]) -> float:
    """Of the faster of two times: the first one warms caches and makes threads."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
