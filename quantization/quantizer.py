"""Quantises a model part by part, each on what the quantised parts before it give.

O output channels, I input channels, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations, QuantConfig, QuantMethod
from models.causal_lm import CausalLM
from quantization.activations import quantize_static
from quantization.calibration import LayerByLayer, Observed, find_layers
from quantization.codes import FP8_MAX, CodeKind, scale_of
from quantization.gptq import gptq
from quantization.layouts.base import Layer, StoredWeight
from quantization.plan import place_quantized, quantizable_layers
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, quantize


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
    """What became of one linear layer. Errors are those of its outputs on calibration data, relative to the float layer's outputs."""

    name: str
    scheme: str
    rounded_error: float | None
    """What rounding to nearest gives, without any method; None where no token reached the layer."""
    error: float | None
    note: str = ""


def parts_of(model: CausalLM, schemes: dict[str, LinearScheme]) -> list[Part]:
    """Every decoder layer, then the head where it has a scheme. Raises UserError for layers outside, which nothing reaches."""
    parent, own = find_layers(model)
    path = next(name for name, module in model.named_modules() if module is parent.get_submodule(own))
    parts = [Part(i, f"{path}.{i}.", {}) for i in range(model.config.num_hidden_layers)]
    head = Part(len(parts), "", {})
    for name, scheme in schemes.items():
        part = next((part for part in parts if name.startswith(part.prefix)), None)
        if part is None and model.get_submodule(name) is not model.head:
            raise UserError(
                f"{name} lies outside of the layers, where calibration does not reach: give quant.skip=[{name}]"
            )
        (part or head).schemes[name] = scheme
    return parts + [Part(head.index, f"{name}.", head.schemes) for name in head.schemes]


class Quantizer:
    """Takes the parts in their order, on the activations that `layers` has for them."""

    def __init__(self, model: CausalLM, config: QuantConfig, layers: LayerByLayer) -> None:
        self._model, self._config, self._layers = model, config, layers

    def quantize(self, part: Part) -> tuple[dict[str, StoredWeight], list[LinearReport]]:
        """Puts quantised layers in the places of the part's linear layers. Raises UserError, naming the layer, for what cannot be."""
        linears = quantizable_layers(self._model)
        groups = self._observe(part)
        stored, reports = {}, []
        for name, scheme in part.schemes.items():
            try:
                stored[name], report = self._quantize_linear(name, scheme, groups.get(name), _widest(groups))
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
            reports.append(report)
        for name, scheme in part.schemes.items():
            place_quantized(self._model, linears[name], scheme, stored[name])
        return stored, reports

    def _observe(self, part: Part) -> dict[str, Observed]:
        """By linear layer what comes to it; without those that no token reaches."""
        with_hessian = self._config.method is QuantMethod.gptq
        if part.index == len(self._layers.layers):
            return {name: self._layers.observe_head(with_hessian) for name in part.schemes}
        own = [name.removeprefix(part.prefix) for name in part.schemes]
        return {
            part.prefix + name: group for group in self._layers.observe(own, with_hessian) for name in group.linears
        }

    def _quantize_linear(
        self, name: str, scheme: LinearScheme, group: Observed | None, widest: Tensor
    ) -> tuple[StoredWeight, LinearReport]:
        weight = float_weight(self._model, name)
        format, note = scheme.weights, ""
        rounded = chosen = quantize(weight, format)
        if group is None:
            note = "no calibration token came here: rounded to nearest"
        elif self._config.method is QuantMethod.gptq:
            assert group.hessian is not None
            gptq_config = self._config.gptq
            chosen, damping = gptq(
                weight,
                group.hessian.mean(),
                format,
                gptq_config.damping,
                gptq_config.act_order,
                gptq_config.static_groups,
            )
            note = f"damping raised to {damping:g}" if damping > gptq_config.damping else ""
        input_scale = None
        if scheme.activations is Activations.static:
            highest = FP8_MAX if format.kind is CodeKind.FP8 else 127
            input_scale = scale_of(group.absmax.max() if group else widest, highest)
        rounded_error, error = (
            _error(weight, quantized, input_scale, format.kind, group) if group else None
            for quantized in (rounded, chosen)
        )
        return StoredWeight(chosen, input_scale), LinearReport(name, str(scheme), rounded_error, error, note)


def _widest(groups: dict[str, Observed]) -> Tensor:
    """The largest activation of a part, for those of its layers that no token reached."""
    return torch.stack([group.absmax.max() for group in groups.values()]).max() if groups else torch.tensor(1.0)


def float_weight(model: CausalLM, name: str) -> Tensor:
    """The weight [O, I] of a linear layer."""
    layer: Layer = quantizable_layers(model)[name]
    weight: Tensor = model.get_submodule(name).weight  # type: ignore[assignment]
    return weight.T if layer.is_transposed else weight


def _error(
    weight: Tensor, quantized: QuantizedWeight, input_scale: Tensor | None, kind: CodeKind, group: Observed
) -> float:
    """|x W - x' W'| / |x W|."""
    x = group.sample.float()
    expected = x @ weight.float().T  # [T, O]
    if input_scale is not None:
        x = quantize_static(x, input_scale, kind).float() * input_scale
    return float((x @ quantized.dequantize().T - expected).norm() / expected.norm().clamp(min=1e-30))
