"""Quantise a model part by part, each on the inputs that a `SequentialCalibrator` observed.

O output channels, I input channels, T tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations, QuantConfig, QuantMethod
from kernels.threads import threads
from models.adapters import Fold
from models.causal_lm import CausalLM
from models.linear_layers import linear_layer, linear_specs
from quantization.calibration import ActivationStats, SequentialCalibrator, Statistics
from quantization.layer_codes import choose_codes, input_scale, output_error, relative_error, rounded_error, sampled
from quantization.layouts.base import StoredWeight
from quantization.plan import float_weight
from quantization.pruning import pruned_entries
from quantization.scheme import LinearScheme
from quantization.smoothing import Smoother, Weights

FLOAT = "float"  # the scheme of a layer that is not quantised


@dataclass(frozen=True)
class QuantizedLayer:
    """A decoder layer, or the head: the unit that is quantised, stored and read back."""

    index: int
    """The index of the decoder layer; for the head, the number of decoder layers."""
    prefix: str
    """Prefix of the names of all its tensors."""
    schemes: dict[str, LinearScheme]
    """By the full names of its linear layers."""
    pruned: list[str]
    """The full names of the linear layers that are pruned first."""


@dataclass(frozen=True)
class LinearReport:
    """The result for one linear layer.

    Errors are output errors on calibration data, relative to the float layer's outputs. For a pruned layer,
    quantisation errors are relative to the pruned layer's outputs.
    """

    name: str
    scheme: str
    """FLOAT for a layer that is only pruned."""
    rounded_error: float | None
    """The error of rounding to nearest, without a method; None if no token reached the layer."""
    error: float | None
    note: str = ""
    sparsity: float | None = None
    """The share of zeros after pruning; None if the layer is not pruned."""
    pruning_error: float | None = None
    """The error of pruning; None also if no token reached the layer."""


def parts_of(model: CausalLM, schemes: dict[str, LinearScheme], pruned: Sequence[str] = ()) -> list[QuantizedLayer]:
    """Return every decoder layer, then the head if it has a scheme.

    pruned: names of linear layers within decoder layers; names beyond the model's last layer are ignored. Raises
    UserError for a linear layer outside the decoder layers that is not the head.
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
                f"{name} is outside the decoder layers, and calibration does not reach it: give quant.skip=[{name}]"
            )
        (part or head).schemes[name] = scheme
    return parts + [QuantizedLayer(head.index, f"{name}.", head.schemes, []) for name in head.schemes]


def num_zeros(model: CausalLM, reports: Iterable[LinearReport]) -> int:
    """Return the number of zeros in the model's pruned layers."""
    layers = linear_specs(model)
    return sum(round(report.sparsity * prod(layers[report.name].shape)) for report in reports if report.sparsity)


def is_sequential(config: QuantConfig) -> bool:
    """Whether the inputs of a layer must come from the quantised layers before it, and not from the float layers.

    The search for clipping weighs the errors of earlier layers, and Wanda measures the outputs of pruned layers. A fold
    changes the keys and values of a static KV cache, so they are observed after it. GPTQ and AWQ gain nothing from
    quantised inputs, which cost a second pass (DECISIONS.md, Quantisation).
    """
    return config.auto_clip or config.sparsity.prunes or config.has_static_kv_cache and config.method.folds_scales


class Quantizer:
    """Quantise the parts in order, on the activations that the calibrator observes."""

    def __init__(self, model: CausalLM, config: QuantConfig, calibrator: SequentialCalibrator) -> None:
        """`model` has whole layers in floats."""
        self._model, self._config, self._calibrator = model, config, calibrator

    def observe_unpruned(self, part: QuantizedLayer) -> list[ActivationStats]:
        """Return the input statistics of the layers to prune, as `SequentialCalibrator.observe` does."""
        names = [name.removeprefix(part.prefix) for name in part.pruned]
        return self._calibrator.observe(names, Statistics(ranges=False))

    def prune(self, part: QuantizedLayer, groups: list[ActivationStats]) -> dict[str, LinearReport]:
        """Prune the part's layers after `observe_unpruned`. Returns reports by full name.

        Raises UserError as check_activations does.
        """
        inputs = {part.prefix + name: group for group in groups for name in group.linears}
        return {name: self._prune_layer(name, inputs.get(name)) for name in part.pruned}

    def observe(self, part: QuantizedLayer) -> list[ActivationStats]:
        """Return the input statistics of the part's linear layers, as `SequentialCalibrator.observe` does."""
        method, activations = self._config.method, {scheme.activations for scheme in part.schemes.values()}
        has_ranges = method is QuantMethod.smoothquant or self._config.shift or Activations.static in activations
        statistics = Statistics(method is QuantMethod.gptq, has_ranges, norms=False)
        names = [name.removeprefix(part.prefix) for name in part.schemes]
        if part.index == len(self._model.layers):
            return [self._calibrator.observe_head(names, statistics)]
        return self._calibrator.observe(names, statistics)

    @threads(None)  # threads of torch wait for each other in each of many short operators
    def quantize(
        self, part: QuantizedLayer, groups: list[ActivationStats], pruned: Mapping[str, LinearReport]
    ) -> tuple[dict[str, StoredWeight], list[LinearReport], dict[str, Fold] | None]:
        """Choose the codes of the part's linear layers after `observe`. Scales and shifts are folded into the model.

        pruned: the result of `prune`; the zeros of these layers stay.

        Returns the weights by full layer name, the reports, and the folds by full layer name. Folds are None for a
        method that folds nothing, and with quant.shift, which scales alone do not describe. Raises UserError that names
        the layer.
        """
        schemes = {name.removeprefix(part.prefix): scheme for name, scheme in part.schemes.items()}
        full_names = dict(zip(schemes, part.schemes, strict=True))
        weights = {name: float_weight(linear_layer(self._model, full_names[name])).float() for name in schemes}
        inputs = {name: group for group in groups for name in group.linears}
        with _error_prefix(part.prefix):
            rounded_errors = {name: rounded_error(weights[name], schemes[name], inputs[name]) for name in inputs}
            notes, folds = self._smooth(part, weights, groups, schemes)
        stored, reports = {}, []
        for name, scheme in schemes.items():
            group = inputs.get(name)
            with _error_prefix(full_names[name]):
                chosen, note = choose_codes(self._config, weights[name], group, scheme, full_names[name] in pruned)
            stored[full_names[name]] = StoredWeight(chosen, input_scale(group, groups, scheme))
            error = output_error(weights[name], chosen, scheme, group) if group else None
            report = pruned.get(full_names[name], LinearReport(full_names[name], FLOAT, None, None))
            note = "; ".join(filter(None, (report.note, notes.get(name), note)))
            rounded = rounded_errors.get(name)
            reports.append(replace(report, scheme=str(scheme), rounded_error=rounded, error=error, note=note))
        reports += [report for name, report in pruned.items() if name not in part.schemes]
        if not self._config.method.folds_scales or self._config.shift:
            return stored, reports, None
        return stored, reports, {full_names[name]: fold for name, fold in folds.items()}

    def _prune_layer(self, name: str, group: ActivationStats | None) -> LinearReport:
        weight, config = float_weight(linear_layer(self._model, name)), self._config.sparsity
        if group is None:
            weight.masked_fill_(pruned_entries(weight, None, config), 0)
            note = "no calibration token came here: pruned by magnitude"
            return LinearReport(name, FLOAT, None, None, note, _share_of_zeros(weight))
        x = sampled(group.sample)
        outputs = x @ sampled(weight).float().T
        with _error_prefix(name):
            weight.masked_fill_(pruned_entries(weight, group.norms, config), 0)
        error = relative_error(x @ sampled(weight).float().T, outputs)
        return LinearReport(name, FLOAT, None, None, "", _share_of_zeros(weight), error)

    def _smooth(
        self, part: QuantizedLayer, weights: Weights, groups: list[ActivationStats], schemes: dict[str, LinearScheme]
    ) -> tuple[dict[str, str], dict[str, Fold]]:
        if not self._config.method.folds_scales:
            return {}, {}
        if part.index == len(self._model.layers):
            return dict.fromkeys(schemes, "not smoothed: the head"), {}
        layer, layout = self._model.layers[part.index], self._model.layout
        smoother = Smoother(layer, layout, weights, self._config, self._calibrator.output)
        return smoother.smooth(groups, {name: scheme.weights for name, scheme in schemes.items()})


def _share_of_zeros(weight: Tensor) -> float:
    return 1 - int(weight.count_nonzero()) / weight.numel()


@contextmanager
def _error_prefix(name: str) -> Iterator[None]:
    """Prefix the message of a UserError in the context with the name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name.rstrip('.')}: {error}") from error
