"""Which layers of a model are quantised and how: the layers of a `quant` option, with what it skips and overrides by name."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from conf.errors import UserError
from conf.quantization import QuantConfig
from models.causal_lm import CausalLM
from models.layers.linear import Conv1D, Linear, TiedHead
from quantization.codes import CodeKind
from quantization.layouts.base import Layer, StoredQuantization, StoredWeight, WeightLayout
from quantization.layouts.floats import FloatLayout
from quantization.linear import CodedLinear, Fp8Linear, IntLinear
from quantization.scheme import LinearScheme, override_of, scheme_of

HEAD = "lm_head"  # the head's name in skip and overrides, whatever a family calls it


def quantizable_layers(model: CausalLM) -> dict[str, Layer]:
    """By name all linear layers but those that the model keeps (`FloatLinear` and other classes of their own)."""
    parameters = {id(parameter): name.removesuffix(".weight") for name, parameter in model.named_parameters()}
    layers = {}
    for name, module in model.named_modules():
        if type(module) in (Linear, Conv1D, TiedHead):
            outputs, inputs = module.weight.shape[::-1] if type(module) is Conv1D else module.weight.shape
            source = parameters[id(module.weight)]
            has_bias = getattr(module, "bias", None) is not None
            layers[name] = Layer(name, source, (outputs, inputs), type(module) is Conv1D, has_bias)
    return layers


def plan(model: CausalLM, config: QuantConfig) -> dict[str, LinearScheme]:
    """The scheme of each layer that gets one, by its name.

    Raises UserError for a pattern that matches none, for groups that do not divide a layer, and where no layer gets a scheme.
    """
    layers = quantizable_layers(model)
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
    schemes, layers = plan(model, config), quantizable_layers(model)
    for name, scheme in schemes.items():
        layer = layers[name]
        _replace(model, layer, layer.source, scheme, FloatLayout(layer.shape, layer.is_transposed, scheme.weights))
    return schemes


def place_stored_layers(
    model: CausalLM, stored: StoredQuantization, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LinearScheme]:
    """Put in the places of the model's layers those that the checkpoint holds quantised. `shapes` are those of its tensors, by name."""
    schemes = {}
    for name, layer in quantizable_layers(model).items():
        scheme = stored.scheme(layer)
        if scheme is not None and (layer.source == name or f"{name}.weight_scale" in shapes):
            found = {
                own: shape
                for tensor, shape in shapes.items()
                for own in [tensor.removeprefix(f"{name}.")]
                if own != tensor
            }
            _replace(model, layer, name, scheme, stored.layout(layer, found))
            schemes[name] = scheme
    return schemes


def place_quantized(model: CausalLM, layer: Layer, scheme: LinearScheme, stored: StoredWeight) -> None:
    """Put a layer with a weight that is quantised already in the place of one that has a float weight; the bias stays."""
    old = model.get_submodule(layer.name)
    weight: Tensor = old.weight  # type: ignore[assignment]
    layout = FloatLayout(layer.shape, layer.is_transposed, scheme.weights)
    new = _replace(model, layer, layer.source, scheme, layout)
    new.hold(stored, getattr(old, "bias", None), weight.dtype, weight.device)


def _replace(model: CausalLM, layer: Layer, source: str, scheme: LinearScheme, layout: WeightLayout) -> CodedLinear:
    kind = Fp8Linear if scheme.weights.kind is CodeKind.FP8 else IntLinear
    parent, _, own = layer.name.rpartition(".")
    new = kind(source, scheme, layout, layer.shape[0], layer.has_bias)
    setattr(model.get_submodule(parent), own, new)
    return new
