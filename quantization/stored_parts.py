"""The unsharded tensors of a quantised part of a model, by their names in the files.

They are written to files, sent to ranks, and placed into a float model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from models.causal_lm import CausalLM
from models.formats.sliced import slice_shard
from models.linear_layers import LinearSpec, linear_layer
from models.sharding import Shard
from models.weights import embedding_name, place_tensor
from quantization.layouts.base import StoredWeight, WritableLayout
from quantization.layouts.sharded import ShardedLayout
from quantization.plan import place_quantized
from quantization.quantizer import LinearReport, QuantizedLayer
from quantization.scheme import LinearScheme

LayoutOf = Callable[[LinearSpec, LinearScheme, Mapping[str, tuple[int, ...]]], WritableLayout]
"""The layout of a layer's weight in the files, from its scheme and, for reading, the shapes of the stored tensors."""


@dataclass(frozen=True)
class StoredPart:
    tensors: dict[str, Tensor]
    """By their names in the files: codes and scales of its linear layers, and its other parameters."""
    reports: list[LinearReport]
    folds: dict[str, Tensor] | None = None
    """The folds of this part, in the form of `smoothing_record.fold_tensors`.

    None if the method records no folds, or if the folds are in the file already.
    """


def part_tensors(
    part: QuantizedLayer,
    model: CausalLM,
    stored: Mapping[str, StoredWeight],
    layout_of: LayoutOf,
    ties_codes: bool,
) -> dict[str, Tensor]:
    """Return the tensors of a part whose codes are chosen. The model still has floats there.

    With `ties_codes`, as of FileLayout, the head comes with the embedding that its codes give.
    """
    coded = tuple(f"{name}." for name in part.schemes)
    tensors = {
        name: parameter.data
        for name, parameter in model.named_parameters()
        if name.startswith(part.prefix) and not name.startswith(coded)
    }
    for name, scheme in part.schemes.items():
        layer = linear_layer(model, name)
        bias = layer.bias
        spec = LinearSpec(name, layer.whole_shape, is_transposed=False, has_bias=bias is not None)
        layer_tensors = layout_of(spec, scheme, {}).write(stored[name])
        layer_tensors |= {} if bias is None else {"bias": bias.data}
        tensors |= {f"{name}.{tensor_name}": tensor for tensor_name, tensor in layer_tensors.items()}
    if ties_codes and (head := stored.get(model.layout.head)):
        name = embedding_name(model)
        tensors[name] = head.weight.dequantize_to(model.get_parameter(name).dtype)
    return tensors


def place_part(
    part: QuantizedLayer,
    model: CausalLM,
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, Shard],
    layout_of: LayoutOf,
    ties_codes: bool,
) -> None:
    """Place a whole part into a model that has floats there. Raises UserError for impossible values.

    A rank's model takes its own shards; `shards` as `shard_model` returns them. `ties_codes`: as of FileLayout.
    """
    device, remaining = next(model.parameters()).device, dict(tensors)
    for name, scheme in part.schemes.items():
        layer, prefix = linear_layer(model, name), f"{name}."
        layer_tensors = {t.removeprefix(prefix): remaining.pop(t) for t in tensors if t.startswith(prefix)}
        if "bias" in layer_tensors:
            remaining[f"{name}.bias"] = layer_tensors.pop("bias")
        spec = LinearSpec(name, layer.whole_shape, layer.is_transposed, layer.bias is not None)
        layout = layout_of(spec, scheme, {n: tuple(t.shape) for n, t in layer_tensors.items()})
        if layer.outputs is None:
            place_quantized(layer, scheme, layout.read(layer_tensors), ties_codes)
        else:
            shared = ShardedLayout(layout, layer.outputs)
            layer_tensors |= {n: slice_shard(layer_tensors[n], shard) for n, shard in shared.shards().items()}
            place_quantized(layer, scheme, shared.read(layer_tensors), ties_codes)
    if ties_codes:
        remaining.pop(embedding_name(model), None)
    for name, tensor in remaining.items():
        shard = slice_shard(tensor, shards[name]) if name in shards else tensor
        place_tensor(model, name, shard.to(device, copy=True))
