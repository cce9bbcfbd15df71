"""Quantises a model part by part, each on the inputs that a `SequentialCalibrator` observed.

O output channels, I input channels, T tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations, QuantConfig, QuantMethod
from models.adapters import Fold
from models.causal_lm import CausalLM
from models.linear_layers import linear_layer, linear_specs
from quantization.activations import quantize_per_token, quantize_static
from quantization.awq import search_clip
from quantization.calibration import ActivationStats, SequentialCalibrator
from quantization.gptq import gptq
from quantization.layouts.base import StoredWeight
from quantization.plan import float_weight
from quantization.pruning import pruned_entries
from quantization.scheme import LinearScheme
from quantization.smoothing import Smoother, Weights
from quantization.smoothing_record import SMOOTHING
from quantization.weight_format import QuantizedWeight, choose_scales, encode, quantize

FLOAT = "float"  # the scheme of a layer that is not quantised
REPORTED = 128  # tokens, and outputs of a layer, that the errors of a report are measured on


@dataclass(frozen=True)
class QuantizedLayer:
    """A decoder layer, or the head: what is quantised, stored and read back in one go."""

    index: int
    """The decoder layer's number; of the head the one after the last."""
    prefix: str
    """What the names of all its tensors begin with."""
    schemes: dict[str, LinearScheme]
    """By the full names of its linear layers."""
    pruned: list[str]
    """The full names of the linear layers that are pruned first."""


@dataclass(frozen=True)
class LinearReport:
    """The outcome for one linear layer. Errors are those of its outputs on calibration data, relative to the float layer's outputs.

    A pruned layer has the error of pruning, and those of quantisation relative to the pruned layer's outputs.
    """

    name: str
    scheme: str
    """FLOAT for one that is only pruned."""
    rounded_error: float | None
    """What rounding to nearest gives, without any method; None where no token reached the layer."""
    error: float | None
    note: str = ""
    sparsity: float | None = None
    """The share of its weights that is 0 after pruning; None where it is not pruned."""
    pruning_error: float | None = None
    """None also where no token reached the layer."""


def parts_of(model: CausalLM, schemes: dict[str, LinearScheme], pruned: Sequence[str] = ()) -> list[QuantizedLayer]:
    """Return every decoder layer, then the head where it has a scheme. Raises UserError for linear layers that are in none of these.

    pruned: names of linear layers within decoder layers; those of further layers than the model has are left out.
    """
    prefixes = [f"{model.layout.layers}.{i}." for i in range(model.config.num_hidden_layers)]
    parts = [
        QuantizedLayer(i, prefix, {}, [name for name in pruned if name.startswith(prefix)])
        for i, prefix in enumerate(prefixes)
    ]
    head = QuantizedLayer(len(parts), "", {}, [])
    for name, scheme in schemes.items():
        part = next((part for part in parts if name.startswith(part.prefix)), None)
        if part is None and model.get_submodule(name) is not model.head:
            raise UserError(
                f"{name} lies outside of the layers, where calibration does not reach: give quant.skip=[{name}]"
            )
        (part or head).schemes[name] = scheme
    return parts + [QuantizedLayer(head.index, f"{name}.", head.schemes, []) for name in head.schemes]


def num_zeros(model: CausalLM, reports: Iterable[LinearReport]) -> int:
    """Return the number of weights of the model's pruned layers that are 0 after pruning."""
    layers = linear_specs(model)
    return sum(round(report.sparsity * prod(layers[report.name].shape)) for report in reports if report.sparsity)


def is_sequential(config: QuantConfig) -> bool:
    """Return whether a layer's inputs are to be what the quantised layers before it give, and not what float ones do.

    GPTQ makes up for the errors of the layers before, searches weigh them, and Wanda measures what pruned layers give. What is folded into
    a layer changes what its static cache holds, so that it is observed afterwards.
    """
    is_folded = config.method in SMOOTHING
    return (
        config.method in (QuantMethod.gptq, QuantMethod.awq)
        or config.auto_clip
        or config.sparsity.prunes
        or config.has_static_kv_cache
        and is_folded
    )


class Quantizer:
    """Takes the parts in their order, on the activations that the calibrator has for them."""

    def __init__(self, model: CausalLM, config: QuantConfig, calibrator: SequentialCalibrator) -> None:
        """`model` has whole layers in floats."""
        self._model, self._config, self._calibrator = model, config, calibrator

    def observe_unpruned(self, part: QuantizedLayer) -> list[ActivationStats]:
        """Return the statistics of the inputs of the part's layers that are going to be pruned, as the calibrator does."""
        return self._calibrator.observe([name.removeprefix(part.prefix) for name in part.pruned])

    def prune(self, part: QuantizedLayer, groups: list[ActivationStats]) -> dict[str, LinearReport]:
        """Set weights of the part's layers, whose inputs were observed, to 0. Returns reports by full name. Raises UserError."""
        inputs = {part.prefix + name: group for group in groups for name in group.linears}
        return {name: self._prune_layer(name, inputs.get(name)) for name in part.pruned}

    def observe(self, part: QuantizedLayer) -> list[ActivationStats]:
        """Return the statistics of the inputs of the part's linear layers, as the calibrator does."""
        with_hessian = self._config.method is QuantMethod.gptq
        names = [name.removeprefix(part.prefix) for name in part.schemes]
        if part.index == len(self._model.layers):
            return [self._calibrator.observe_head(names, with_hessian)]
        return self._calibrator.observe(names, with_hessian)

    def quantize(
        self, part: QuantizedLayer, groups: list[ActivationStats], pruned: Mapping[str, LinearReport]
    ) -> tuple[dict[str, StoredWeight], list[LinearReport], dict[str, Fold] | None]:
        """Choose the codes of the part's linear layers, whose inputs were observed. What is folded is folded into the model.

        `pruned`: what `prune` returned, of whose layers the zeros stay.

        Returns the weights by their layers' full names, reports, and folds by full name: None with a method that folds nothing, and beside
        quant.shift, which scales alone do not tell of. Raises UserError, naming the layer, for what cannot be.
        """
        schemes = {name.removeprefix(part.prefix): scheme for name, scheme in part.schemes.items()}
        full_names = dict(zip(schemes, part.schemes, strict=True))
        weights = {name: float_weight(linear_layer(self._model, full_names[name])).float() for name in schemes}
        inputs = {name: group for group in groups for name in group.linears}
        with _naming(part.prefix):
            rounded_errors = {name: _rounded_error(weights[name], schemes[name], inputs[name]) for name in inputs}
            notes, folds = self._smooth(part, weights, groups, schemes)
        stored, reports = {}, []
        for name, scheme in schemes.items():
            group = inputs.get(name)
            with _naming(full_names[name]):
                chosen, note = self._choose(weights[name], group, scheme, full_names[name] in pruned)
            stored[full_names[name]] = StoredWeight(chosen, _input_scale(group, groups, scheme))
            error = _error(weights[name], _sampled_weight(chosen), scheme, group) if group else None
            report = pruned.get(full_names[name], LinearReport(full_names[name], FLOAT, None, None))
            note = "; ".join(filter(None, (report.note, notes.get(name), note)))
            rounded = rounded_errors.get(name)
            reports.append(replace(report, scheme=str(scheme), rounded_error=rounded, error=error, note=note))
        reports += [report for name, report in pruned.items() if name not in part.schemes]
        if self._config.method not in SMOOTHING or self._config.shift:
            return stored, reports, None
        return stored, reports, {full_names[name]: fold for name, fold in folds.items()}

    def _prune_layer(self, name: str, group: ActivationStats | None) -> LinearReport:
        weight, config = float_weight(linear_layer(self._model, name)), self._config.sparsity
        if group is None:
            weight.masked_fill_(pruned_entries(weight, None, config), 0)
            note = "no calibration token came here: pruned by magnitude"
            return LinearReport(name, FLOAT, None, None, note, _share_of_zeros(weight))
        x = _sampled(group.sample)
        outputs = x @ _sampled(weight).float().T
        with _naming(name):
            weight.masked_fill_(pruned_entries(weight, group.norms, config), 0)
        error = _relative_error(x @ _sampled(weight).float().T, outputs)
        return LinearReport(name, FLOAT, None, None, "", _share_of_zeros(weight), error)

    def _smooth(
        self, part: QuantizedLayer, weights: Weights, groups: list[ActivationStats], schemes: dict[str, LinearScheme]
    ) -> tuple[dict[str, str], dict[str, Fold]]:
        if self._config.method not in SMOOTHING:
            return {}, {}
        if part.index == len(self._model.layers):
            return dict.fromkeys(schemes, "not smoothed: the head"), {}
        layer, layout = self._model.layers[part.index], self._model.layout
        smoother = Smoother(layer, layout, weights, self._config, self._calibrator.output)
        return smoother.smooth(groups, {name: scheme.weights for name, scheme in schemes.items()})

    def _choose(
        self, weight: Tensor, group: ActivationStats | None, scheme: LinearScheme, is_pruned: bool
    ) -> tuple[QuantizedWeight, str]:
        """Return the codes of weight [O, I], and a note. Zeros of a pruned one stay zeros."""
        if group is None:
            return quantize(weight, scheme.weights), "no calibration token came here: rounded to nearest"
        if self._config.method is QuantMethod.gptq:
            assert group.hessian is not None
            config = self._config.gptq
            how = config.damping, config.act_order, config.static_groups, weight != 0 if is_pruned else None
            chosen, damping = gptq(weight, group.hessian.mean(), scheme.weights, *how)
            return chosen, f"damping raised to {damping:g}" if damping > config.damping else ""
        if self._config.auto_clip:
            weight = search_clip(weight, group.sample, scheme.weights)
        return quantize(weight, scheme.weights), ""


def _input_scale(group: ActivationStats | None, groups: list[ActivationStats], scheme: LinearScheme) -> Tensor | None:
    """Return the static scale of a layer's input; of one that no token reached the widest of its part."""
    if scheme.activations is not Activations.static:
        return None
    reaching = [group] if group else groups
    return (
        torch.stack([group.static_scale(scheme.weights.kind) for group in reaching]).amax()
        if reaching
        else torch.ones(())
    )


def _share_of_zeros(weight: Tensor) -> float:
    return 1 - int(weight.count_nonzero()) / weight.numel()


def _sampled(tensor: Tensor) -> Tensor:
    """Return about REPORTED rows of a tensor, evenly taken."""
    return tensor[:: max(1, -(-len(tensor) // REPORTED))]


def _sampled_weight(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the weight of sampled outputs."""
    scales = weight.scales if len(weight.scales) == 1 else _sampled(weight.scales)
    zero_points = None if weight.zero_points is None else _sampled(weight.zero_points)
    return QuantizedWeight(_sampled(weight.codes), scales, zero_points, weight.permutation)


def _rounded_error(weight: Tensor, scheme: LinearScheme, group: ActivationStats) -> float:
    """Return the error of rounding weight [O, I] to nearest."""
    rows, format = _sampled(weight), scheme.weights
    scales, zero_points = choose_scales(weight if format.per_tensor else rows, format)
    return _error(
        weight, QuantizedWeight(encode(rows, scales, zero_points, format), scales, zero_points), scheme, group
    )


def _error(weight: Tensor, sampled: QuantizedWeight, scheme: LinearScheme, group: ActivationStats) -> float:
    """Return the relative error of x W^T that quantised weights and activations cause, on a sample of tokens and outputs. weight [O, I]"""
    x, kind = _sampled(group.sample), scheme.weights.kind
    outputs = x @ _sampled(weight).T
    if scheme.activations is Activations.static:
        scale = group.static_scale(kind)
        x = quantize_static(x, scale, kind).float() * scale
    elif scheme.activations is Activations.dynamic:
        codes, scales = quantize_per_token(x, kind)
        x = codes.float() * scales
    return _relative_error(x @ sampled.dequantize().T, outputs)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Let a UserError inside begin with the name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name.rstrip('.')}: {error}") from error
