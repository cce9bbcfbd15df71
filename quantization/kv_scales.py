"""Static scales of the KV cache, one per head: parameters of attention modules, named as in compressed-tensors.

G key/value heads. Source: the package compressed-tensors, 0.20 (strategy `attn_head`: [G, 1, 1]; `tensor`: one number).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from conf.quantization import KVCacheFormat
from kernels.kv_format import FLOAT8_MAX, INT8_MAX, STATIC_FORMATS, KVFormat, Unquantised
from models.causal_lm import CausalLM
from models.layers.attention import Heads
from models.sharding import Shard
from models.weights import assign
from quantization.codes import scale_of
from quantization.layouts.checks import positive

KEY, VALUE = "k_scale", "v_scale"
ZERO_POINTS = (".k_zero_point", ".v_zero_point")  # some tools write them next to symmetric scales; they are not read
LARGEST_CODES = {KVCacheFormat.int8: INT8_MAX, KVCacheFormat.fp8: FLOAT8_MAX}


def place_kv_scales(model: CausalLM, per_head: bool, tensor_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Register uninitialised float32 scales in every attention module, in a model of any dtype.

    `tensor_shapes` are the shapes of the checkpoint's tensors, by name: some tools write [G] for [G, 1, 1], and [] for [1].
    """
    device = next(model.parameters()).device
    for name, heads in _scales(model).items():
        count = heads.num_key_value_heads
        shapes = [(count, 1, 1), (count,)] if per_head else [(1,), ()]
        shape = tensor_shapes[name] if tensor_shapes.get(name) in shapes else shapes[0]
        module, _, scale_name = name.rpartition(".")
        scale = nn.Parameter(torch.empty(shape, device=device), requires_grad=False)
        model.get_submodule(module).register_parameter(scale_name, scale)
    model.float32_tensors = (*model.float32_tensors, KEY, VALUE)


def choose_kv_scales(
    model: CausalLM, layer: int, absmax: tuple[Tensor, Tensor], format: KVCacheFormat
) -> dict[str, Shard]:
    """Set a layer's scales, which map the largest magnitudes of keys and values, [G] each, to the largest code.

    Returns, by scale name, the shard of the whole layer's scales that this rank has.
    """
    module, shards = f"{model.layout.layers}.{layer}.{model.layout.attention}", {}
    for scale_name, largest in zip((KEY, VALUE), absmax, strict=True):
        name = f"{module}.{scale_name}"
        if (heads := _scales(model).get(name)) is not None:
            assign(model, name, scale_of(largest, LARGEST_CODES[format]).reshape(-1, 1, 1))
            shards[name] = Shard(0, (range(heads.first_key, heads.first_key + heads.num_key_value_heads),))
    return shards


def static_kv_formats(model: CausalLM, format: KVCacheFormat) -> list[tuple[KVFormat, KVFormat]]:
    """Return the formats of each layer's keys and values. Raises UserError for scales that are not positive numbers."""
    kind, scales = STATIC_FORMATS[format.name], _scales(model)

    def format_of(name: str) -> KVFormat:
        if name not in scales:  # the cache stores no values
            return Unquantised()
        count = scales[name].num_key_value_heads
        return kind(positive(model.get_parameter(name), name).flatten().expand(count).contiguous())

    return [(format_of(f"{name}.{KEY}"), format_of(f"{name}.{VALUE}")) for name in attention_names(model)]


def attention_names(model: CausalLM) -> list[str]:
    """Return the names of the attention modules, in the order of the model's own layers."""
    layout = model.layout
    layers = zip(model.local_layers, model.layer_caches, strict=False)  # an MTP layer has no number of its own
    return [f"{layout.layers}.{i}.{layout.attention}" for i, content in layers if content.heads is not None]


def _scales(model: CausalLM) -> dict[str, Heads]:
    """Return the layer's heads by scale name. A layer whose cache stores no values has no value scale."""
    # An MTP layer, which only drafts, has no scales.
    layers = zip(attention_names(model), model.attention_heads, strict=False)
    return {
        f"{name}.{scale_name}": heads
        for name, heads in layers
        for scale_name in ((KEY, VALUE) if heads.value_head_dim else (KEY,))
    }
