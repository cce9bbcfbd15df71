"""Static scales of the KV cache, one for each head: parameters of a model's attention modules, named as compressed-tensors names them.

G key/value heads. Source: the package compressed-tensors, 0.20 (strategy `attn_head`: [G, 1, 1]; `tensor`: one number).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from conf.quantization import KVCacheFormat
from kernels.kv_format import FLOAT8_MAX, INT8_MAX, STATIC_FORMATS, KVFormat, Unquantised
from models.causal_lm import CausalLM
from models.weights import assign
from quantization.codes import scale_of
from quantization.layouts.checks import positive

KEY, VALUE = "k_scale", "v_scale"
ZERO_POINTS = (".k_zero_point", ".v_zero_point")  # which some tools write beside symmetric scales, and nobody reads
LARGEST_CODES = {KVCacheFormat.int8: INT8_MAX, KVCacheFormat.fp8: FLOAT8_MAX}


def place_kv_scales(model: CausalLM, per_head: bool, found: Mapping[str, tuple[int, ...]]) -> None:
    """Give all attention modules scales, not initialised, on the model's device, and float32 in a model of any dtype.

    `found` are the shapes of a checkpoint's tensors, by name: some tools write [G] for [G, 1, 1], and [] for [1].
    """
    heads, device = model.config.num_key_value_heads, next(model.parameters()).device
    shapes = [(heads, 1, 1), (heads,)] if per_head else [(1,), ()]
    for name in _scale_names(model):
        shape = found[name] if found.get(name) in shapes else shapes[0]
        module, _, own = name.rpartition(".")
        scale = nn.Parameter(torch.empty(shape, device=device), requires_grad=False)
        model.get_submodule(module).register_parameter(own, scale)
    model.float32_tensors = (*model.float32_tensors, KEY, VALUE)


def choose_kv_scales(model: CausalLM, layer: int, absmax: tuple[Tensor, Tensor], format: KVCacheFormat) -> None:
    """Fill a layer's scales, so that the largest magnitudes of its keys and of its values [G] meet the largest code."""
    module = attention_names(model)[layer]
    for own, largest in zip((KEY, VALUE), absmax, strict=True):
        name = f"{module}.{own}"
        if name in _scale_names(model):
            assign(model, name, scale_of(largest, LARGEST_CODES[format]).reshape(-1, 1, 1))


def static_kv_formats(model: CausalLM, format: KVCacheFormat) -> list[tuple[KVFormat, KVFormat]]:
    """Of each layer's keys and values. Raises UserError for scales that are not positive numbers."""
    kind, heads = STATIC_FORMATS[format.name], model.config.num_key_value_heads
    names = _scale_names(model)

    def format_of(name: str) -> KVFormat:
        if name not in names:  # values that are not kept
            return Unquantised()
        return kind(positive(model.get_parameter(name), name).flatten().expand(heads).contiguous())

    return [(format_of(f"{name}.{KEY}"), format_of(f"{name}.{VALUE}")) for name in attention_names(model)]


def attention_names(model: CausalLM) -> list[str]:
    """The modules that keep keys and values, in the order of the layers."""
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] == model.attention]


def _scale_names(model: CausalLM) -> list[str]:
    """Of latents the keys are the values, too."""
    kept = (KEY, VALUE) if model.config.value_head_dim else (KEY,)
    return [f"{name}.{own}" for name in attention_names(model) for own in kept]
