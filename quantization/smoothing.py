"""Scales and shifts that make a layer easier to quantise, folded into the modules before its linear layers.

The architecture's layout names the candidates. A fold is impossible if another module reads the scaled output, so each
fold is tested: the float layer's output must stay the same. I input channels of linear layers, D channels of a norm, T
tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from conf.errors import UserError
from conf.quantization import QuantConfig, QuantMethod
from models.adapters import Fold
from models.layout import ModelLayout
from models.linear_layers import linear_layer
from quantization.awq import search_scales
from quantization.calibration import ActivationStats
from quantization.fold import divide_norm, divide_outputs, midpoint, multiply_inputs, shift_inputs, shift_norm
from quantization.smoothquant import search_smooth_scales, smooth_scales
from quantization.weight_format import WeightFormat

NUM_GROUPS = 3  # of channels in a piecewise search, each with its own alpha
# The relative change of a layer's output that a fold may cause: about two or three roundings in the dtype.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Weights = dict[str, Tensor]
"""By linear layer, named within its decoder layer: the float32 weight [O, I] that is quantised next."""


class Smoother:
    """Folds scales into one decoder layer."""

    def __init__(
        self, layer: nn.Module, layout: ModelLayout, weights: Weights, config: QuantConfig, run: Callable[[], Tensor]
    ) -> None:
        """`run` returns the layer's output on a probe. `weights` and the layer's parameters are modified."""
        self._layer, self._layout, self._weights, self._config, self._run = layer, layout, weights, config, run
        self._expected = run()

    def smooth(
        self, groups: list[ActivationStats], formats: dict[str, WeightFormat]
    ) -> tuple[dict[str, str], dict[str, Fold]]:
        """Scale every group whose producer exists, and update `groups` to the scaled inputs.

        Returns notes and folds by linear layer. All folds are tested together. If the output changes, they are undone,
        repeated and tested one by one. With quant.shift they are tested one by one from the start.
        """
        # Groups without a norm come first, because the linear layers after a norm may be their producers.
        ordered = sorted(groups, key=lambda group: group.norm is not None)
        before = self._state()
        folded = [] if self._config.shift else [self._fold(group, formats) for group in ordered]
        if self._config.shift or not self._keeps_output():
            self._restore(before)
            folded = [self._checked_fold(group, formats) for group in ordered]
        notes: dict[str, str] = {}
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        for group, scales in zip(ordered, folded, strict=True):
            if scales is None:
                notes |= dict.fromkeys(group.linears, "not smoothed: nothing before it can be scaled")
                continue
            group.divide(scales)
            inputs |= dict.fromkeys(group.linears, scales)
            if group.norm is None and (producer := self._producer(group.linears[0], scales)):
                outputs[producer] = scales
        return notes, {name: Fold(inputs.get(name), outputs.get(name)) for name in inputs | outputs}

    def _checked_fold(self, group: ActivationStats, formats: dict[str, WeightFormat]) -> Tensor | None:
        """Fold as `_fold` does. Undo the fold and return None if it changes the layer's output."""
        if self._config.shift and group.norm is not None:
            self._shift(group)
        before = self._state()
        scales = self._fold(group, formats)
        if scales is None or self._keeps_output():
            return scales
        self._restore(before)
        return None

    def _state(self) -> tuple[dict[str, Tensor], Weights]:
        """Return the parameters and weights. A shallow copy is enough: folds replace tensors and never modify them."""
        return {name: parameter.data for name, parameter in self._layer.named_parameters()}, dict(self._weights)

    def _restore(self, state: tuple[dict[str, Tensor], Weights]) -> None:
        parameters, weights = state
        for name, parameter in self._layer.named_parameters():
            parameter.data = parameters[name]
        self._weights.update(weights)

    def _find_scales(self, group: ActivationStats, format: WeightFormat) -> Tensor:
        weights = [self._weights[name] for name in group.linears]
        if self._config.method is QuantMethod.awq:
            return search_scales(weights, group.sample, format)
        if self._config.smooth.piecewise:
            return search_smooth_scales(group.sample, weights, NUM_GROUPS)
        return smooth_scales(group.sample, weights, self._config.smooth.alpha)

    def _fold(self, group: ActivationStats, formats: dict[str, WeightFormat]) -> Tensor | None:
        """Divide the group's input by scales [I] and multiply its weights' columns.

        Returns the scales; None without a producer.
        """
        scales = self._find_scales(group, formats[group.linears[0]])
        if group.norm is not None:
            scales = self._divide_norm(group.norm, scales)
        elif producer := self._producer(group.linears[0], scales):
            self._divide_outputs(producer, scales)
        else:
            return None
        for name in group.linears:
            self._set_weight(name, multiply_inputs(self._weights[name], scales))
        return scales

    def _divide_norm(self, name: str, scales: Tensor) -> Tensor:
        """Divide a norm's output by scales [I].

        Returns the scales that the norm applies after its weight is rounded to its dtype.
        """
        weight, bias = self._parameters(name)
        offset = self._layout.norm_weight_offset
        divided, divided_bias = divide_norm(weight.data, None if bias is None else bias.data, scales, offset)
        exact = (weight.data.float() + offset) / (divided.float() + offset)
        weight.data = divided
        if bias is not None and divided_bias is not None:
            bias.data = divided_bias
        return torch.where(exact.isfinite() & (exact > 0), exact, scales)

    def _producer(self, consumer: str, scales: Tensor) -> str | None:
        """Return the layer whose output channels [I] are the consumer's inputs; None if there is none."""
        parent, _, name = consumer.rpartition(".")
        producer = f"{parent}.{self._layout.scale_fold_targets.get(name)}".strip(".")
        return producer if producer in self._weights and self._weights[producer].shape[0] == len(scales) else None

    def _divide_outputs(self, producer: str, scales: Tensor) -> None:
        _, bias = self._parameters(producer)
        divided, divided_bias = divide_outputs(self._weights[producer], None if bias is None else bias.data, scales)
        self._set_weight(producer, divided)
        if bias is not None and divided_bias is not None:
            bias.data = divided_bias

    def _shift(self, group: ActivationStats) -> None:
        """Centre the output of the group's norm. Raises UserError for a layer without the biases that take the shift."""
        assert group.norm is not None
        shift = midpoint(*group.bounds)
        biases = {name: self._parameters(name)[1] for name in (group.norm, *group.linears)}
        for name, bias in biases.items():
            if bias is None:
                needed = "quant.shift needs norms and linear layers with biases, as BLOOM, GPT-2 and OPT have"
                raise UserError(f"{needed}, but {name} has none: leave it out")
            is_norm = name == group.norm
            bias.data = shift_norm(bias.data, shift) if is_norm else shift_inputs(self._weights[name], bias.data, shift)
        if not self._keeps_output():
            raise UserError(f"quant.shift changes what this architecture computes after {group.norm}: leave it out")
        group.shift_by(shift)

    def _parameters(self, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
        module = self._layer.get_submodule(name)
        return self._layer.get_parameter(f"{name}.weight"), getattr(module, "bias", None)

    def _set_weight(self, name: str, weight: Tensor) -> None:
        self._weights[name] = weight
        parameter, _ = self._parameters(name)
        is_transposed = linear_layer(self._layer, name).is_transposed
        parameter.data = (weight.T if is_transposed else weight).to(parameter.dtype)

    def _keeps_output(self) -> bool:
        actual, expected = self._run().float(), self._expected.float()
        return bool((actual - expected).norm() <= TOLERANCES[self._expected.dtype] * expected.norm())
