"""Scales and shifts that make a layer's activations or weights easier to quantise, folded into what stands before its linear layers.

An architecture's layout names the candidates. Whether a fold is possible, because nothing else reads what is scaled, is tried: the float
layer's output must stay what it was. I input channels of linear layers, D channels of a norm, T tokens.
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

NUM_GROUPS = 3  # of channels that have an alpha of their own in a piecewise search
# By how much a layer's output may differ after a fold, relatively: what two or three roundings in the dtype explain.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Weights = dict[str, Tensor]
"""By a linear layer's name in its decoder layer the weight [O, I] in float32, as it is going to be quantised."""


class Smoother:
    """Folds scales into one decoder layer."""

    def __init__(
        self, layer: nn.Module, layout: ModelLayout, weights: Weights, config: QuantConfig, run: Callable[[], Tensor]
    ) -> None:
        """`run` returns the layer's output on some data. `weights` and the layer's parameters are changed."""
        self._layer, self._layout, self._weights, self._config, self._run = layer, layout, weights, config, run
        self._expected = run()

    def smooth(
        self, groups: list[ActivationStats], formats: dict[str, WeightFormat]
    ) -> tuple[dict[str, str], dict[str, Fold]]:
        """Scale every group whose producer is found; `groups` then tell of scaled inputs. Returns notes and folds by linear layer.

        All folds are checked at once; where one of them changes the output, they are made again and checked one after the other.
        """
        # a norm's linear layers may be producers themselves
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
        """Fold as `_fold` does; undo it, and return None, if it changes the layer's output."""
        if self._config.shift and group.norm is not None:
            self._shift(group)
        before = self._state()
        scales = self._fold(group, formats)
        if scales is None or self._keeps_output():
            return scales
        self._restore(before)
        return None

    def _state(self) -> tuple[dict[str, Tensor], Weights]:
        """Return what folds replace, and do not write into."""
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
        return smooth_scales(group.absmax, weights, self._config.smooth.alpha)

    def _fold(self, group: ActivationStats, formats: dict[str, WeightFormat]) -> Tensor | None:
        """Divide the group's input by scales [I] and multiply its weights' columns. Returns the scales, or None: no producer."""
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
        """Divide a norm's output by scales [I]. Returns the scales that its rounded weight stands for, for its readers to multiply by."""
        weight, bias = self._parameters(name)
        offset = self._layout.norm_weight_offset
        divided, divided_bias = divide_norm(weight.data, None if bias is None else bias.data, scales, offset)
        exact = (weight.data.float() + offset) / (divided.float() + offset)
        weight.data = divided
        if bias is not None and divided_bias is not None:
            bias.data = divided_bias
        return torch.where(exact.isfinite() & (exact > 0), exact, scales)

    def _producer(self, consumer: str, scales: Tensor) -> str | None:
        """Return the name of the layer whose output channels are the consumer's inputs, as many as scales [I]; None where there is none."""
        parent, _, own = consumer.rpartition(".")
        producer = f"{parent}.{self._layout.scale_fold_targets.get(own)}".strip(".")
        return producer if producer in self._weights and self._weights[producer].shape[0] == len(scales) else None

    def _divide_outputs(self, producer: str, scales: Tensor) -> None:
        """Divide the outputs of a linear layer by scales [O]."""
        _, bias = self._parameters(producer)
        divided, divided_bias = divide_outputs(self._weights[producer], None if bias is None else bias.data, scales)
        self._set_weight(producer, divided)
        if bias is not None and divided_bias is not None:
            bias.data = divided_bias

    def _shift(self, group: ActivationStats) -> None:
        """Raises UserError for a layer without the biases that a shift goes into."""
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
        """Return a module's weight and bias."""
        module = self._layer.get_submodule(name)
        return self._layer.get_parameter(f"{name}.weight"), getattr(module, "bias", None)

    def _set_weight(self, name: str, weight: Tensor) -> None:
        """Set a linear layer's weight [O, I] float32."""
        self._weights[name] = weight
        parameter, _ = self._parameters(name)
        is_transposed = linear_layer(self._layer, name).is_transposed
        parameter.data = (weight.T if is_transposed else weight).to(parameter.dtype)

    def _keeps_output(self) -> bool:
        found, expected = self._run().float(), self._expected.float()
        return bool((found - expected).norm() <= TOLERANCES[self._expected.dtype] * expected.norm())
