"""quant=auto: groups of layers that need one format, their candidates, and the budget.

The loss of a group is the mean KL divergence in nats of the model with only this group quantised, from the float model.
It is measured for the smallest format. The loss of another format is proportional to the squared error of its weights:
near its minimum the divergence is quadratic in a small change of the weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.errors import ErrorCode, UserError
from conf.quantization import AUTO_BITS, QuantConfig, QuantMethod, QuantScheme
from models.causal_lm import CausalLM
from models.layers.linear import Linear, MergedLinear
from models.layers.moe import Experts
from models.linear_layers import linear_layer, linear_specs
from models.weights import module_bytes
from quantization.allocation import Candidate
from quantization.layouts.base import StoredWeight
from quantization.layouts.floats import FloatLayout
from quantization.linear import method_of
from quantization.plan import float_weight, named_layers, plan
from quantization.scheme import LinearScheme, parse_format
from quantization.weight_format import QuantizedWeight, quantize

SUPER_BLOCKS = "q3_k", "q4_k", "q5_k", "q6_k", "int8"  # for layers whose input channels are a multiple of 256
BLOCKS = "int4/64", "q4_1", "q5_0", "q5_1", "int8"
ON_GPU = "int4/128", "int4/64", "int4/32", "int8"


@dataclass(frozen=True)
class Group:
    """Layers that one kernel call multiplies. All of them need the same format."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    schemes: dict[str, LinearScheme]
    """By format, the smallest first."""

    @property
    def num_weights(self) -> int:
        return sum(outputs * inputs for outputs, inputs in self.shapes)

    def num_bytes(self, format: str) -> int:
        return sum(self.schemes[format].weights.num_bytes(*shape) for shape in self.shapes)


def find_groups(model: CausalLM, config: QuantConfig, device: torch.device) -> list[Group]:
    """Return the groups of the layers for which the options give no format."""
    specs, fixed = linear_specs(model), named_layers(model, config)
    members: dict[str, list[str]] = {}
    for name, key in _fused_with(model).items():
        if name in specs and name not in fixed:
            members.setdefault(key, []).append(name)
    if not members:
        raise UserError("quant=auto has no layer to choose for: give fewer quant.overrides or quant.skip")
    groups = []
    for names in members.values():
        inputs = specs[names[0]].shape[1]
        schemes = {text: parse_format("quant.plan", text) for text in _formats(inputs, device)}
        fitting = {text: scheme for text, scheme in schemes.items() if scheme is not None}
        groups.append(Group(tuple(names), tuple(specs[name].shape for name in names), fitting))
    return groups


def _formats(num_inputs: int, device: torch.device) -> list[str]:
    if device.type != "cpu":
        return [text for text in ON_GPU if num_inputs % int(text.partition("/")[2] or 1) == 0]
    if num_inputs % 256 == 0:
        return [*SUPER_BLOCKS]
    if num_inputs % 32:
        return ["int8"]
    return [text for text in BLOCKS if num_inputs % 64 == 0 or text != "int4/64"]


def _fused_with(model: CausalLM) -> dict[str, str]:
    """Return a key for each linear layer. Layers with one key are multiplied together."""
    names = {module: name for name, module in model.named_modules()}
    keys = {name: name for module, name in names.items() if isinstance(module, Linear)}
    for module in names:
        for merged in vars(module).values():
            if isinstance(merged, MergedLinear):
                keys |= dict.fromkeys((names[layer] for layer in merged.layers), names[merged.layers[0]])
    for module, name in names.items():
        if isinstance(module, Experts):
            inside = {layer: key for layer, key in keys.items() if layer.startswith(f"{name}.")}
            keys |= {layer: f"{name}.{key.removeprefix(f'{name}.').partition('.')[2]}" for layer, key in inside.items()}
    return keys


def free_bytes(model: CausalLM, config: QuantConfig, dtype: torch.dtype) -> int:
    """Return the budget of the layers for which the options give no format."""
    specs, fixed = linear_specs(model), named_layers(model, config)
    numbers = {name: spec.shape[0] * spec.shape[1] for name, spec in specs.items()}
    if config.max_bytes is None:
        num_weights = sum(number for name, number in numbers.items() if name not in fixed)
        return int((config.bits or AUTO_BITS) / 8 * num_weights)
    fixed_bytes = sum(module_bytes(model, dtype).values()) - dtype.itemsize * sum(numbers.values())
    rounded = replace(config, scheme=QuantScheme.int8, method=QuantMethod.rtn, imatrix=None, max_bytes=None)
    chosen = plan(model, rounded) if config.overrides else {}
    for name in fixed & numbers.keys():
        scheme = chosen.get(name)
        fixed_bytes += (
            numbers[name] * dtype.itemsize if scheme is None else scheme.weights.num_bytes(*specs[name].shape)
        )
    return config.max_bytes - fixed_bytes


def check_budget(groups: Sequence[Group], max_bytes: int, config: QuantConfig) -> None:
    least = sum(min(map(group.num_bytes, group.schemes)) for group in groups)
    if least <= max_bytes:
        return
    if config.max_bytes is None:
        smallest = math.ceil(800 * least / sum(group.num_weights for group in groups)) / 100
        raise UserError(
            f"quant.bits={config.bits or AUTO_BITS:g} is less than the smallest formats of this model: give at least {smallest:g}",
            ErrorCode.out_of_range,
            "quant.bits",
        )
    raise UserError(
        f"quant.max_bytes={config.max_bytes} is less than the smallest formats of this model and its floats: "
        f"give at least {config.max_bytes - max_bytes + least}",
        ErrorCode.out_of_range,
        "quant.max_bytes",
    )


def measure(
    model: CausalLM,
    group: Group,
    device: torch.device,
    importance: Mapping[str, Tensor],
    divergence: Callable[[], float],
) -> list[Candidate]:
    """Return the group's candidates. The model has float weights, and is unchanged afterwards.

    importance: mean square of each input channel, [I] by layer name, for quant.method=imatrix; it weights the errors.
    `divergence` returns the model's mean KL divergence from the float model.
    """
    layers = [linear_layer(model, name) for name in group.names]
    floats = [layer.method for layer in layers]
    weights = [float_weight(layer) for layer in layers]
    importances = [importance.get(name) for name in group.names]
    smallest, *_ = group.schemes
    errors, loss = dict[str, float](), 0.0
    for format, scheme in group.schemes.items():
        stored = [
            quantize(weight, scheme.weights, squares) for weight, squares in zip(weights, importances, strict=True)
        ]
        errors[format] = sum(map(_squared_error, weights, stored, importances))
        if format != smallest:
            continue
        for layer, quantized in zip(layers, stored, strict=True):
            method = method_of(scheme, FloatLayout(layer.shape, False, scheme.weights), layer.shape)
            method.hold(StoredWeight(quantized), device)
            layer.method = method
        loss = divergence()
        for layer, before in zip(layers, floats, strict=True):
            layer.method = before
    scale = max(loss, 0.0) / errors[smallest] if errors[smallest] else 0.0
    return [Candidate(format, group.num_bytes(format), scale * errors[format]) for format in group.schemes]


def _squared_error(weight: Tensor, stored: QuantizedWeight, importance: Tensor | None) -> float:
    squares = (stored.dequantize().to(weight.device) - weight.float()).square()
    weighted = squares if importance is None else squares * importance.to(weight.device)
    return float(weighted.sum(dtype=torch.float64))
