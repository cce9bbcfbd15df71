"""Which layers of a model are quantised and how: the layers of a `quant` option, with what it skips and overrides by name."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from conf.errors import UserError
from conf.quantization import Activations, QuantConfig, QuantScheme
from models.causal_lm import CausalLM
from models.layers.linear import FloatLinear, Layer, PlainLinear
from models.linear_layers import linear_layers, replace_layer
from quantization.codes import CodeKind
from quantization.layouts.base import StoredQuantization, StoredWeight, WeightLayout, holds_codes
from quantization.layouts.floats import FloatLayout
from quantization.linear import CodedLinear, DequantizedLinear, Fp8Linear, IntLinear
from quantization.scheme import LinearScheme, override_of, scheme_of

HEAD = "lm_head"  # the head's name in skip and overrides, whatever a family calls it


def plan(model: CausalLM, config: QuantConfig) -> dict[str, LinearScheme]:
    """The scheme of each layer that gets one, by its name; with quant=none there are none.

    Raises UserError for a pattern that matches none, for groups that do not divide a layer, and where no layer gets a scheme.
    """
    if config.scheme is QuantScheme.none:
        return {}
    layers = linear_layers(model)
    aliases = {name: (name, HEAD) if model.get_submodule(name) is model.head else (name,) for name in layers}
    if HEAD not in {alias for names in aliases.values() for alias in names}:
        aliases[HEAD] = (HEAD,)  # a head that is kept anyway may be skipped, too
    schemes: dict[str, LinearScheme | None] = dict.fromkeys(layers, scheme_of(config))
    changes = [(pattern, override_of(pattern, text), "overrides") for pattern, text in config.overrides.items()]
    changes += [(pattern, None, "skip") for pattern in config.skip]
    for pattern, scheme, field in changes:
        matched = [name for name, names in aliases.items() if any(fnmatchcase(own, pattern) for own in names)]
        if not matched:
            raise UserError(
                f"quant.{field} has {pattern!r}, which matches no layer: there are {', '.join(_kinds(aliases))} and so on"
            )
        schemes |= {name: scheme for name in matched if name in layers}
    chosen = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    if not chosen:
        raise UserError(
            f"quant={config.scheme.name} leaves all {len(layers)} layers as they are: skip fewer, or give quant=none"
        )
    for name, scheme in chosen.items():
        size = scheme.weights.group_size
        if size and layers[name].shape[1] % size:
            raise UserError(
                f"{name} has {layers[name].shape[1]} input channels, which groups of {size} do not divide: "
                f"give a quant.group_size that does, quant.overrides, or quant.skip=[{name}]"
            )
    return chosen


def _kinds(names: Iterable[str]) -> list[str]:
    """One full name for each last part of a name."""
    return list({name.rpartition(".")[2]: name for name in reversed(list(names))}.values())


def quantize_while_loading(model: CausalLM, config: QuantConfig) -> dict[str, LinearScheme]:
    """Put in the places of the model's layers, which are on the meta device, such that quantise their float weights when they come.

    Returns the schemes by layer. Raises UserError as `plan` does.
    """
    schemes, layers = plan(model, config), linear_layers(model)
    for name, scheme in schemes.items():
        layer = layers[name]
        _replace(model, layer, layer.source, scheme, FloatLayout(layer.shape, layer.is_transposed, scheme.weights))
    return schemes


def place_stored_layers(
    model: CausalLM, stored: StoredQuantization, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LinearScheme]:
    """Put in the places of the model's layers those that the checkpoint holds quantised. `shapes` are those of its tensors, by name."""
    tensors: dict[str, dict[str, tuple[int, ...]]] = {}  # by module and own name
    for tensor, shape in shapes.items():
        module, _, own = tensor.rpartition(".")
        tensors.setdefault(module, {})[own] = shape
    quantizable = linear_layers(model)
    schemes = {}
    for name, layer in (quantizable | linear_layers(model, FloatLinear, PlainLinear)).items():
        found = tensors.get(name, {})
        scheme = stored.scheme(layer, found)
        is_kept = name not in quantizable or layer.source != name  # a tied head may be quantised beside its embedding
        if scheme is None or is_kept and not holds_codes(found):
            continue
        try:
            layout = stored.layout(layer, found)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        if name in quantizable:
            _replace(model, layer, name, scheme, layout)
            schemes[name] = scheme
        else:
            replace_layer(model, name, DequantizedLinear(name, scheme, layout, layer.shape, layer.has_bias))
    return schemes


def place_quantized(model: nn.Module, layer: Layer, scheme: LinearScheme, stored: StoredWeight) -> None:
    """Put a layer with a weight that is quantised already in the place of one that has a float weight; the bias stays."""
    old = model.get_submodule(layer.name)
    weight: Tensor = old.weight  # type: ignore[assignment]
    layout = FloatLayout(layer.shape, layer.is_transposed, scheme.weights)
    new = _replace(model, layer, layer.source, scheme, layout)
    new.hold(stored, getattr(old, "bias", None), weight.dtype, weight.device)


def make_activations_auto(model: CausalLM) -> None:
    """Let the layers that quantise weights alone quantise activations, too, where a product has many rows.

    Raises UserError if there is no such layer.
    """
    layers = [m for m in model.modules() if isinstance(m, IntLinear) and m.scheme.activations is Activations.none]
    if not layers:
        raise UserError(
            "quant.activations=auto is for int8 and int4 weights with float activations, and this model has none: "
            "leave it out, or give a float model with quant=int8 or quant=int4"
        )
    for layer in layers:
        layer.scheme = replace(layer.scheme, activations=Activations.auto)


def _replace(model: nn.Module, layer: Layer, source: str, scheme: LinearScheme, layout: WeightLayout) -> CodedLinear:
    kind = Fp8Linear if scheme.weights.kind is CodeKind.FP8 else IntLinear
    new = kind(source, scheme, layout, layer.shape, layer.has_bias)
    replace_layer(model, layer.name, new)
    return new
