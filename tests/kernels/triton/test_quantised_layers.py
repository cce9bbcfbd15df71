"""Layers of every scheme in the GPU's form, compared with the same layers in the CPU's form."""

from itertools import product
from unittest.mock import patch

import pytest
import torch

import kernels.linear
import kernels.rms_norm.triton
import kernels.swiglu.triton
import models.layers.linear
import models.layers.norm
import quantization.linear
from conf.quantization import Activations
from kernels.linear import Float8Weight, GPUWeight, matmul
from kernels.linear.block_weight import read_blocks
from kernels.linear.gpu_weight import pack_fp4, take_rows
from kernels.quantize_rows import QuantizedActivations, quantize_rows
from kernels.swiglu import swiglu
from models.layers.linear import MergedLinear
from models.layers.norm import AddRMSNorm
from quantization.codes import CodeKind
from quantization.layouts.base import StoredWeight
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, of_blocks, quantize
from tests.helpers.cases import each
from tests.helpers.gguf_files import random_blocks
from tests.helpers.triton_cases import DEVICE, assert_near, noise, tiers
from tests.helpers.triton_layers import FP8, SCHEMES, WEIGHTS, is_scheme, make_layer
from tests.helpers.triton_products import on_device


@tiers("weights, activations, dtype", *SCHEMES, [torch.float32, torch.bfloat16], is_case=is_scheme)
def test_a_layer_is_the_cpus(weights: str, activations: Activations, dtype: torch.dtype) -> None:
    scheme = LinearScheme(WEIGHTS[weights], activations)
    x, bias = noise(7, 256, dtype=dtype), noise(70)
    scale = x.abs().amax().float() / (448 if scheme.weights.kind is FP8 else 127)
    stored = StoredWeight(
        quantize(noise(70, 256, seed=1), scheme.weights), scale if activations is Activations.static else None
    )
    expected = make_layer(stored, scheme, bias, dtype, "cpu")(x, None)
    with patch.object(kernels.linear, "_on_gpu", lambda tensor: True):
        layer = make_layer(stored, scheme, bias, dtype, DEVICE)
    assert isinstance(layer.method.weight, GPUWeight)
    # float32: the CPU has 16 bits of an activation that is not quantised. bfloat16: a CPU rounds float8 weights, or
    # their products, once more; both round the result and its sum with the bias.
    tolerance = 1e-4 if dtype is torch.float32 else 4 * 2**-9
    assert_near(layer(x.to(DEVICE), None), expected, tolerance)
    assert_near(layer(x[2:3].to(DEVICE), None), expected[2:3], tolerance)
    held = sum(part.nbytes for part in layer.parameters()) - layer.bias.nbytes
    assert held == num_bytes(stored, scheme) == layer.method.num_bytes(dtype)


@each("kind, bits", [("MXFP4", 4.25), ("NVFP4", 4.5 + 32 / 256)])  # NVFP4 has a float32 for each output
def test_fp4(kind: str, bits: float) -> None:
    """Its activations stay floats."""
    blocks, is_nvfp4 = torch.from_numpy(random_blocks(kind, 70, 256, seed=0)), kind == "NVFP4"
    # a denormal scale, and large ones
    blocks[:2, 0] = torch.tensor([1, 126] if is_nvfp4 else [0, 126], dtype=torch.uint8)
    global_scale = 1 / 3 if is_nvfp4 else 1.0
    weight, values = (
        on_device(pack_fp4(kind, blocks, global_scale)),
        read_blocks(kind, blocks, global_scale).dequantize(),
    )
    numbers, rounded = torch.tensor([69, 0, 1, 0]), 2**-23 if is_nvfp4 else 0  # the global scale is a float32 here
    rows_of_it = take_rows(weight, numbers.to(DEVICE), torch.float32).cpu()
    torch.testing.assert_close(rows_of_it, values[numbers], rtol=rounded, atol=0)
    for rows, dtype in product((1, 5, 17, 70), (torch.float32, torch.bfloat16, torch.float16)):  # one per way to launch
        x = noise(rows, 256, dtype=dtype)
        assert_near(matmul(x.to(DEVICE), weight), x.double() @ values.double().T)
    x, bias, scales = noise(7, 256), noise(70), torch.tensor([[global_scale]]).double()
    stored = StoredWeight(QuantizedWeight(blocks, scales if is_nvfp4 else torch.empty(70, 0)))
    expected = make_layer(stored, LinearScheme(of_blocks(kind)), bias, torch.float32, "cpu")(x, None)
    with patch.object(quantization.linear, "pack_blocks", pack_fp4):
        layer = make_layer(stored, LinearScheme(of_blocks(kind), Activations.dynamic), bias, torch.float32, DEVICE)
    assert isinstance(layer.method.weight, GPUWeight)
    assert_near(layer(x.to(DEVICE), None), expected, 1e-4)
    assert sum(part.nbytes for part in layer.parameters()) - layer.bias.nbytes == 70 * 256 * bits / 8
    if is_nvfp4:
        with pytest.raises(ValueError, match="an NVFP4 weight is multiplied by rows of floats"):
            matmul(QuantizedActivations(*quantize_rows(x.to(DEVICE)), torch.float32), weight)


@tiers("weights, dtype", ["int8", "int4 groups", "fp8", "fp8 groups"], [torch.float32, torch.bfloat16])
def test_a_norm_and_swiglu_leave_nothing_to_quantise(weights: str, dtype: torch.dtype) -> None:
    scheme, biases = LinearScheme(WEIGHTS[weights], Activations.dynamic), (noise(256), noise(256), noise(70))
    parts = [
        (StoredWeight(quantize(noise(len(b), 256, seed=i), scheme.weights), None), b) for i, b in enumerate(biases)
    ]
    x, update = noise(5, 256, dtype=dtype), noise(5, 256, dtype=dtype, seed=1)
    norm = AddRMSNorm(256, 1e-5).requires_grad_(False).to(dtype)
    norm.weight.copy_(noise(256))
    gate, up, down = (make_layer(stored, scheme, bias, dtype, "cpu") for stored, bias in parts)
    normed, total = norm(x, update)
    expected = down(swiglu(gate(normed, None), up(normed, None)), None)
    with (
        patch.object(kernels.linear, "_on_gpu", lambda tensor: True),
        patch.object(models.layers.norm, "add_rms_norm_quantize", kernels.rms_norm.triton.add_rms_norm_quantize),
        patch.object(models.layers.linear, "swiglu_quantize", kernels.swiglu.triton.swiglu_quantize),
        patch.object(quantization.linear, "quantize_rows", None),
    ):
        gate, up, down = (make_layer(stored, scheme, bias, dtype, DEVICE) for stored, bias in parts)
        gate_up = MergedLinear(torch.nn.Module(), {"gate": gate, "up": up})
        gate_up.merge()
        rows, again = norm.to(DEVICE)(x.to(DEVICE), update.to(DEVICE), [gate, up])
        result = down(gate_up.swiglu(rows, None, [down]), None)
    assert torch.equal(again.cpu(), total)
    # a value between two codes may round to either: int8 codes are 1/127 apart, float8 codes 1/16
    assert_near(result, expected, 1 / 127 if scheme.weights.kind is CodeKind.INT else 1 / 16)


def num_bytes(stored: StoredWeight, scheme: LinearScheme) -> int:
    """256 inputs are whole chunks, so nothing is padded; there is one scale per output."""
    weight, (outputs, groups) = stored.weight, (70, stored.weight.scales.shape[1])
    zeros = 0 if weight.zero_points is None else outputs * groups
    return weight.codes.numel() * scheme.weights.bits // 8 + 4 * outputs * groups + zeros


def test_blocks_of_a_size_that_no_kernel_has_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.linear, "_on_gpu", lambda tensor: True)
    codes = noise(70, 256).to(torch.float8_e4m3fn)
    assert isinstance(kernels.linear.pack_float8(codes, torch.ones(70, 16)), Float8Weight)
