"""Quantises a model part by part, each on the inputs that a `SequentialCalibrator` observed.

O output channels, I input channels, T tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations, QuantConfig, QuantMethod
from models.adapters import Fold
from models.causal_lm import CausalLM
from models.linear_layers import linear_layer
from quantization.activations import quantize_per_token, quantize_static
from quantization.awq import search_clip
from quantization.calibration import ActivationStats, SequentialCalibrator
from quantization.gptq import gptq
from quantization.layouts.base import StoredWeight
from quantization.plan import float_weight
from quantization.scheme import LinearScheme
from quantization.smoothing import Smoother, Weights
from quantization.smoothing_record import SMOOTHING
from quantization.weight_format import QuantizedWeight, choose_scales, encode, quantize

REPORTED = 128  # tokens, and outputs of a layer, that the errors of a report are measured on


@dataclass(frozen=True)
class Part:
    """A decoder layer, or the head: what is quantised, stored and read back in one go."""

    index: int
    """The decoder layer's number; of the head the one after the last."""
    prefix: str
    """What the names of all its tensors begin with."""
    schemes: dict[str, LinearScheme]
    """By the full names of its linear layers."""


@dataclass(frozen=True)
class LinearReport:
    """The outcome for one linear layer. Errors are those of its outputs on calibration data, relative to the float layer's outputs."""

    name: str
    scheme: str
    rounded_error: float | None
    """What rounding to nearest gives, without any method; None where no token reached the layer."""
    error: float | None
    note: str = ""


def parts_of(model: CausalLM, schemes: dict[str, LinearScheme]) -> list[Part]:
    """Return every decoder layer, then the head where it has a scheme. Raises UserError for linear layers that are in none of these."""
    parts = [Part(i, f"{model.layout.layers}.{i}.", {}) for i in range(model.config.num_hidden_layers)]
    head = Part(len(parts), "", {})
    for name, scheme in schemes.items():
        part = next((part for part in parts if name.startswith(part.prefix)), None)
        if part is None and model.get_submodule(name) is not model.head:
            raise UserError(
                f"{name} lies outside of the layers, where calibration does not reach: give quant.skip=[{name}]"
            )
        (part or head).schemes[name] = scheme
    return parts + [Part(head.index, f"{name}.", head.schemes) for name in head.schemes]


def is_sequential(config: QuantConfig) -> bool:
    """Return whether a layer's inputs are to be what the quantised layers before it give, and not what float ones do.

    GPTQ makes up for the errors of the layers before, and searches weigh them. What is folded into a layer changes what its static cache
    holds, so that it is observed afterwards.
    """
    is_folded = config.method in SMOOTHING
    return (
        config.method in (QuantMethod.gptq, QuantMethod.awq)
        or config.auto_clip
        or config.has_static_kv_cache
        and is_folded
    )


class Quantizer:
    """Takes the parts in their order, on the activations that the calibrator has for them."""

    def __init__(self, model: CausalLM, config: QuantConfig, calibrator: SequentialCalibrator) -> None:
        """`model` has whole layers in floats."""
        self._model, self._config, self._calibrator = model, config, calibrator

    def observe(self, part: Part) -> list[ActivationStats]:
        """Return the statistics of the inputs of the part's linear layers, as the calibrator does."""
        with_hessian = self._config.method is QuantMethod.gptq
        names = [name.removeprefix(part.prefix) for name in part.schemes]
        if part.index == len(self._model.layers):
            return [self._calibrator.observe_head(names, with_hessian)]
        return self._calibrator.observe(names, with_hessian)

    def quantize(
        self, part: Part, groups: list[ActivationStats]
    ) -> tuple[dict[str, StoredWeight], list[LinearReport], dict[str, Fold] | None]:
        """Choose the codes of the part's linear layers, whose inputs were observed. What is folded is folded into the model.

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
                chosen, note = self._choose(weights[name], group, scheme)
            stored[full_names[name]] = StoredWeight(chosen, _input_scale(group, groups, scheme))
            error = _error(weights[name], _sampled_weight(chosen), scheme, group) if group else None
            note = "; ".join(filter(None, (notes.get(name), note)))
            reports.append(LinearReport(full_names[name], str(scheme), rounded_errors.get(name), error, note))
        if self._config.method not in SMOOTHING or self._config.shift:
            return stored, reports, None
        return stored, reports, {full_names[name]: fold for name, fold in folds.items()}

    def _smooth(
        self, part: Part, weights: Weights, groups: list[ActivationStats], schemes: dict[str, LinearScheme]
    ) -> tuple[dict[str, str], dict[str, Fold]]:
        if self._config.method not in SMOOTHING:
            return {}, {}
        if part.index == len(self._model.layers):
            return dict.fromkeys(schemes, "not smoothed: the head"), {}
        layer, layout = self._model.layers[part.index], self._model.layout
        smoother = Smoother(layer, layout, weights, self._config, self._calibrator.output)
        return smoother.smooth(groups, {name: scheme.weights for name, scheme in schemes.items()})

    def _choose(
        self, weight: Tensor, group: ActivationStats | None, scheme: LinearScheme
    ) -> tuple[QuantizedWeight, str]:
        """Return the codes of weight [O, I], and a note."""
        if group is None:
            return quantize(weight, scheme.weights), "no calibration token came here: rounded to nearest"
        if self._config.method is QuantMethod.gptq:
            assert group.hessian is not None
            config = self._config.gptq
            how = config.damping, config.act_order, config.static_groups
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
    return float((x @ sampled.dequantize().T - outputs).norm() / outputs.norm().clamp(min=1e-30))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Let a UserError inside begin with the name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name.rstrip('.')}: {error}") from error
