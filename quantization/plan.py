"""Choose the layers that are quantised, and their schemes, from `quant`, `quant.skip` and `quant.overrides`."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType

from torch import Tensor

from conf.decoding import warn_once
from conf.errors import UserError
from conf.quantization import MIXTURES, Activations, BlockActivations, QuantConfig, QuantScheme, SparsityPattern
from kernels.linear.block_weight import KINDS
from models.causal_lm import CausalLM
from models.layers.dense import DenseMethod
from models.layers.embedding import Embedding
from models.layers.linear import Linear, tied_embedding
from models.linear_layers import LinearSpec, linear_layer, linear_specs
from quantization.layouts.base import StoredQuantization, StoredWeight, holds_codes
from quantization.layouts.floats import FloatLayout
from quantization.layouts.gguf import GGUFQuantization
from quantization.linear import BlockMethod, Dequantized, IntMethod, method_of
from quantization.pruning import GROUP
from quantization.scheme import LinearScheme, fitted, fitted_blocks, parse_format, scheme_of

HEAD = "lm_head"  # name of the head in skip and overrides, for every model family
AUTO_NEEDS_INTEGERS = (
    "quant.activations=auto is for int8 and int4 weights with float activations, and this model has none: "
    "leave it out, or give a float model with quant=int8 or quant=int4"
)


def plan(model: CausalLM, config: QuantConfig) -> dict[str, LinearScheme]:
    """Return the scheme of each quantised layer, by name; empty with quant=none.

    Raises UserError for a pattern that matches no layer, for groups that do not divide a layer's input channels, and if
    no layer gets a scheme.
    """
    if config.scheme is QuantScheme.none:
        return {}
    layers, aliases = linear_specs(model), _aliases(model)
    default = scheme_of(config)
    schemes: dict[str, LinearScheme | None] = dict.fromkeys(layers, default)
    assert config.scheme not in (*MIXTURES, QuantScheme.auto)  # `resolve_mixture` and `resolve_plan` replaced them
    if config.group_size is None:
        schemes |= {name: fitted(default, linear_layer(model, name).whole_shape[1]) for name in layers}
    changes = [
        (pattern, parse_format(f"quant.overrides.{pattern}", text), "overrides")
        for pattern, text in config.overrides.items()
    ]
    changes += [(pattern, None, "skip") for pattern in config.skip]
    overridden = set[str]()
    for pattern, scheme, field in changes:
        matched = _matched(pattern, field, aliases)
        schemes |= {name: scheme for name in matched if name in layers}
        overridden |= {*matched}
    chosen = _fitting(model, {name: scheme for name, scheme in schemes.items() if scheme is not None})
    if not chosen:
        raise UserError(
            f"quant={config.scheme.name} quantises none of {len(layers)} layers: skip fewer layers, or give quant=none"
        )
    for name, scheme in chosen.items():
        size = scheme.weights.group_size
        if size and layers[name].shape[1] % size:
            raise UserError(
                f"{name} has {layers[name].shape[1]} input channels, which groups of {size} do not divide: "
                f"give a quant.group_size that does, quant.overrides, or quant.skip=[{name}]"
            )
    if config.group_size is None:
        _warn_of_smaller_groups(chosen, {*layers} - overridden, default)
    return chosen


def _fitting(model: CausalLM, schemes: Mapping[str, LinearScheme]) -> dict[str, LinearScheme]:
    """Return the schemes with shorter blocks for layers whose channels the blocks do not divide.

    A layer that no blocks divide stays in floats, and a warning counts it.
    """
    fitting = {name: fitted_blocks(s, linear_layer(model, name).whole_shape[1]) for name, s in schemes.items()}
    if floats := [name for name, scheme in fitting.items() if scheme is None]:
        warn_once(
            f"{len(floats)} layers stay in floats, because blocks of 32 do not divide their channels ({floats[0]})"
        )
    return {name: scheme for name, scheme in fitting.items() if scheme is not None}


def plan_pruning(model: CausalLM, config: QuantConfig) -> list[str]:
    """Return the names of the linear layers that `quant.sparsity` prunes, without skipped layers.

    They are in decoder layers. Raises UserError for a pattern that matches no layer, if no layer is left to prune, and
    for input channels that groups of four do not divide.
    """
    if not config.sparsity.prunes:
        return []
    layers, aliases = linear_specs(model), _aliases(model)
    skipped = {name for pattern in config.skip for name in _matched(pattern, "skip", aliases)}
    chosen = [name for name in layers if name.startswith(f"{model.layout.layers}.") and name not in skipped]
    if not chosen:
        raise UserError(f"quant.skip leaves none of {len(layers)} layers to prune: skip fewer")
    for name in chosen:
        if config.sparsity.pattern is SparsityPattern["2:4"] and layers[name].shape[1] % GROUP:
            raise UserError(
                f"{name} has {layers[name].shape[1]} input channels, which groups of {GROUP} do not divide: "
                f"give quant.sparsity.pattern=unstructured, or quant.skip=[{name}]"
            )
    return chosen


def _aliases(model: CausalLM) -> dict[str, tuple[str, ...]]:
    """Return, by layer name, the names by which a pattern matches the layer."""
    layers = linear_specs(model)
    aliases: dict[str, tuple[str, ...]] = {
        name: (name, HEAD) if model.get_submodule(name) is model.head else (name,) for name in layers
    }
    if HEAD not in {alias for names in aliases.values() for alias in names}:
        aliases[HEAD] = (HEAD,)  # a pattern may also skip a head that is never quantised
    return aliases


def named_layers(model: CausalLM, config: QuantConfig) -> set[str]:
    """Return the linear layers that `quant.overrides` or `quant.skip` names. Raises UserError as `plan` does."""
    aliases = _aliases(model)
    patterns = [(pattern, "overrides") for pattern in config.overrides] + [(pattern, "skip") for pattern in config.skip]
    return {name for pattern, field in patterns for name in _matched(pattern, field, aliases)}


def _matched(pattern: str, field: str, aliases: Mapping[str, tuple[str, ...]]) -> list[str]:
    matched = [name for name, names in aliases.items() if any(fnmatchcase(alias, pattern) for alias in names)]
    if not matched:
        raise UserError(
            f"quant.{field} has {pattern!r}, which matches no layer: there are {', '.join(_example_names(aliases))} and so on"
        )
    return matched


def _warn_of_smaller_groups(
    schemes: Mapping[str, LinearScheme], layers: Collection[str], default: LinearScheme
) -> None:
    counts = Counter(
        schemes[name].weights.group_size for name in layers if name in schemes and schemes[name] != default
    )
    if counts:
        layers_by_size = " and ".join(f"{count} layers have groups of {size}" for size, count in counts.items())
        warn_once(f"{layers_by_size}, because {default.weights.group_size} does not divide their input channels")


def _example_names(names: Iterable[str]) -> list[str]:
    """Return one full name for each distinct last part of a name."""
    return list({name.rpartition(".")[2]: name for name in reversed(list(names))}.values())


def quantize_while_loading(
    model: CausalLM, config: QuantConfig, importance: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, LinearScheme]:
    """Make the model's layers, which are on the meta device, quantise their float weights while they are loaded.

    importance: mean square of each input channel, [I] by layer name, for quant.method=imatrix; layers in blocks use it.
    Returns the schemes by layer name. Raises UserError as `plan` does.
    """
    schemes = plan(model, config)
    in_blocks = [name for name, scheme in schemes.items() if scheme.weights.kind.is_blocks]
    if importance and (missing := [name for name in in_blocks if name not in importance]):
        warn_once(
            f"{len(missing)} of {len(in_blocks)} layers in blocks are quantised without importance, because the "
            f"importance matrix has no entry for them ({missing[0]})"
        )
    for name, scheme in schemes.items():
        layer = linear_layer(model, name)
        layout = FloatLayout(layer.shape, layer.is_transposed, scheme.weights, importance.get(name))
        layer.method = method_of(scheme, layout, layer.shape)
    if config.embedding is not None:
        _quantize_embedding(model, config.embedding)
    return schemes


def _quantize_embedding(model: CausalLM, format: str) -> None:
    """Make an untied embedding quantise its float rows while it is loaded. `format`: as in `quant.overrides`."""
    embedding = model.embedding
    assert isinstance(embedding, Embedding)
    if tied_embedding(model.head) is embedding:
        raise UserError(
            f"quant.embedding={format}, but the embedding of this model is its head's matrix: "
            f"give quant.overrides={{{HEAD}:{format}}}"
        )
    scheme = parse_format("quant.embedding", format)
    if scheme is None:
        return
    kind = scheme.weights.kind
    size = KINDS[kind.name].block_size if kind.is_blocks else scheme.weights.group_size or 1
    if embedding.embedding_dim % size:
        raise UserError(
            f"quant.embedding={format} has groups of {size}, which do not divide the embedding's {embedding.embedding_dim} "
            "channels: give int8, or another format"
        )
    layout = FloatLayout(embedding.shape, False, scheme.weights)
    embedding.method = method_of(scheme, layout, embedding.shape)


def place_stored_layers(
    model: CausalLM, stored: StoredQuantization, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LinearScheme]:
    """Make the model's layers load the quantised tensors of a checkpoint.

    `shapes` are the shapes of its tensors, by name.

    Returns the schemes by layer name, without layers that the model keeps in floats. Raises UserError for tensors that
    the layout cannot hold.
    """
    tensors: dict[str, dict[str, tuple[int, ...]]] = {}  # by module, then by the name within it
    for tensor, shape in shapes.items():
        module, _, name = tensor.rpartition(".")
        tensors.setdefault(module, {})[name] = shape
    schemes = dict[str, LinearScheme]()
    for name, spec in (linear_specs(model) | linear_specs(model, quantizable=False)).items():
        layer, tensor_shapes = linear_layer(model, name), tensors.get(name, {})
        scheme = stored.scheme(spec, tensor_shapes)
        # A tied head may have its own quantised weight in addition to the embedding.
        is_float = not layer.is_quantizable or layer.tied_embedding is not None
        if scheme is None or is_float and not holds_codes(tensor_shapes):
            continue
        try:
            layout = stored.layout(spec, tensor_shapes)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        if layer.is_quantizable:
            layer.untie(method_of(scheme, layout, layer.shape))
            schemes[name] = scheme
        else:
            layer.method = DenseMethod(Dequantized(layout, layer.shape))
    return schemes


def place_stored_embedding(
    model: CausalLM, stored: StoredQuantization, shapes: Mapping[str, tuple[int, ...]]
) -> LinearScheme | None:
    """Make the token embedding load the codes of a file that quantises it. A tied head multiplies by them.

    `shapes`: as for `place_stored_layers`. Returns the embedding's scheme. None: it is in floats.
    """
    embedding, head = model.embedding, model.head
    if not isinstance(embedding, Embedding):
        return None
    if tied_embedding(head) is embedding and not (head.is_quantizable and head.is_packable):
        return None
    prefix = f"{model.layout.embedding}."
    tensor_shapes = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    has_head_codes = holds_codes(tensor_shapes)  # as with meta_model.TIED_CODES
    if not has_head_codes and not isinstance(stored, GGUFQuantization):
        return None
    name = model.layout.head if has_head_codes else model.layout.embedding
    spec = LinearSpec(name, embedding.shape, is_transposed=False, has_bias=False)
    scheme = stored.scheme(spec, tensor_shapes)
    if scheme is not None:
        embedding.method = method_of(scheme, stored.layout(spec, tensor_shapes), embedding.shape)
    return scheme


def float_weight(layer: Linear) -> Tensor:
    """Return the weight [O, I] of a float layer."""
    weight = layer.method.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def place_quantized(layer: Linear, scheme: LinearScheme, stored: StoredWeight, ties_codes: bool) -> None:
    """Replace the float weight of a layer by a quantised weight. The bias stays.

    `ties_codes`: a tied embedding gets the same weight; else it keeps its floats. Blocks get int8 activations, as they
    have by default in a run of the files.
    """
    if scheme.weights.kind.is_blocks:
        scheme = replace(scheme, activations=Activations.dynamic)
    method = method_of(scheme, FloatLayout(layer.shape, layer.is_transposed, scheme.weights), layer.shape)
    method.hold(stored, float_weight(layer).device)
    if ties_codes:
        layer.method = method
    else:
        layer.untie(method)


def set_block_activations(model: CausalLM, choice: BlockActivations) -> None:
    """Set the format of the activations of all layers in blocks.

    Raises UserError for none if no layer is in blocks.
    """
    methods = [module.method for module in model.modules() if isinstance(module, Linear)]
    in_blocks = [method for method in methods if isinstance(method, BlockMethod)]
    if choice is BlockActivations.none and not in_blocks:
        raise UserError("quant.block_activations=none, but no layer is in blocks of llama.cpp: leave it out")
    if choice is BlockActivations.int8:
        for method in in_blocks:
            method.scheme = replace(method.scheme, activations=Activations.dynamic)


def make_activations_auto(model: CausalLM) -> None:
    """Switch layers with float activations to activations=auto: products of many rows quantise their activations.

    Raises UserError if no layer has integer weights and float activations.
    """
    methods = [module.method for module in model.modules() if isinstance(module, Linear)]
    int_methods = [m for m in methods if isinstance(m, IntMethod) and m.scheme.activations is Activations.none]
    if not int_methods:
        raise UserError(AUTO_NEEDS_INTEGERS)
    for method in int_methods:
        method.scheme = replace(method.scheme, activations=Activations.auto)
