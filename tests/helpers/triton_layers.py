"""Quantised layers on a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from conf.quantization import Activations
from models.layers.linear import Linear, MergedLinear
from quantization.codes import CodeKind
from quantization.layouts.base import StoredWeight
from quantization.linear import method_of
from quantization.scheme import LinearScheme
from quantization.weight_format import WeightFormat, of_blocks, quantize
from tests.helpers.triton_cases import DEVICE, assert_near, noise

FP8 = CodeKind.FP8
WEIGHTS = {
    "int8": WeightFormat(),
    "int8 groups": WeightFormat(group_size=64),
    "int4": WeightFormat(4),
    "int4 groups": WeightFormat(4, group_size=32),
    "int4 zero points": WeightFormat(4, symmetric=False, group_size=128),
    "fp8": WeightFormat(8, FP8),
    "fp8 tensor": WeightFormat(8, FP8, per_tensor=True),
    "fp8 groups": WeightFormat(8, FP8, group_size=128),
}


def make_layer(
    stored: StoredWeight, scheme: LinearScheme, bias: Tensor | None, dtype: torch.dtype, device: str
) -> Linear:
    outputs, inputs = stored.weight.codes.shape
    layer = Linear(inputs, outputs, bias is not None).requires_grad_(False)
    if bias is not None:
        layer.bias.data = bias.to(device, dtype)  # type: ignore[union-attr]
    method = method_of(scheme, None, layer.shape)  # type: ignore[arg-type]
    method.hold(stored, torch.device(device))
    layer.method = method
    return layer


FP4 = {"mxfp4": of_blocks("MXFP4"), "nvfp4": of_blocks("NVFP4")}  # its activations stay floats

# auto is one of the first two, by the number of rows
SCHEMES = (list(WEIGHTS), [Activations.none, Activations.dynamic, Activations.static])
OUTPUTS = (48, 80, 38)
FLOATS, BLOCKS = "floats", "fp8 blocks"


def is_scheme(weights: str, activations: Activations, *others: Any) -> bool:
    """Return whether it is one of SCHEMES except the scheme that `read_fp8` rejects."""
    return (weights, activations) != ("fp8 groups", Activations.static)


def make_layers(
    kind: str,
    activations: Activations = Activations.none,
    outputs: Sequence[int] = OUTPUTS,
    inputs: int = 256,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = True,
) -> list[Linear]:
    """Return layers. `kind`: one of WEIGHTS or FP4, FLOATS, or BLOCKS of 128 outputs and inputs that share a scale."""
    layers: list[Linear] = []
    for seed, size in enumerate(outputs):
        weight, bias = noise(size, inputs, seed=seed) / 16, noise(size, seed=seed) if has_bias else None
        if kind == FLOATS:
            layer = Linear(inputs, size, has_bias)
            layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
            layers.append(layer.to(DEVICE, dtype).requires_grad_(False))
            continue
        scheme = LinearScheme((WEIGHTS | FP4)["fp8 groups" if kind == BLOCKS else kind], activations)
        quantized = quantize(weight, scheme.weights)
        if kind == BLOCKS:
            scales = quantized.scales[::128].repeat_interleave(128, 0)[:size]
            quantized = replace(quantized, scales=scales)
        scale = torch.tensor(0.03) if activations is Activations.static else None
        layers.append(make_layer(StoredWeight(quantized, scale), scheme, bias, dtype, DEVICE))
    return layers


def each_alone(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    return [layer(x, None) for layer in layers]


def merged(layers: Sequence[Linear]) -> MergedLinear:
    together = MergedLinear(nn.Module(), {f"part_{i}": layer for i, layer in enumerate(layers)})
    together.merge()
    return together


def check_joined(layers: list[Linear], x: Tensor) -> None:
    """Compare with the layers' outputs before fusing, which other tests prove. Only the order of sums differs."""
    alone = each_alone(x, layers)
    names = [{name: (part.shape, part.nbytes) for name, part in layer.named_parameters()} for layer in layers]
    together = merged(layers)
    assert together.is_merged
    assert names == [{name: (part.shape, part.nbytes) for name, part in layer.named_parameters()} for layer in layers]
    # each layer has become a view of the fused weight
    held = {part.untyped_storage().data_ptr() for layer in layers for part in layer.parameters()}
    assert len(held) == len(list(layers[0].parameters()))
    for result, expected in zip(each_alone(x, layers), alone, strict=True):
        assert_near(result, expected)
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, inputs: pytest.fail("called alone"))
    method = type(layers[0].method)
    with patch.object(method, "apply", autospec=True, side_effect=method.apply) as apply:
        results = together(x, None)
    assert apply.call_count == 1
    for result, expected in zip(results, alone, strict=True):
        assert_near(result, expected)
