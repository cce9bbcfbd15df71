"""Layers that share their input: whatever holds their weights, together they give what each gives alone, to the bit."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from conf.quantization import Activations
from kernels.quantize_rows import QuantizedRows, RowCodes
from kernels.swiglu import swiglu
from models.layers.dense import DenseLinear
from models.layers.linear import JointLinear, Layer, Linear, linear_swiglu, linear_together, shared_row_codes
from models.layers.norm import AddRMSNorm, RMSNorm
from quantization.codes import CodeKind
from quantization.layouts.base import StoredWeight
from quantization.layouts.floats import FloatLayout
from quantization.linear import MANY_ROWS, DequantizedLinear, Fp8Linear, IntLinear
from quantization.quantizer import quantize
from quantization.scheme import LinearScheme
from quantization.weight_format import WeightFormat

INPUTS, CPU = 96, torch.device("cpu")
INT8, INT4, FP8 = WeightFormat(8), WeightFormat(4, symmetric=False, group_size=32), WeightFormat(8, CodeKind.FP8)
FP8_GROUPS = WeightFormat(8, CodeKind.FP8, group_size=32)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def dense(num_outputs: int, dtype: torch.dtype, has_bias: bool = True) -> DenseLinear:
    layer = DenseLinear(Layer("l", "l", (num_outputs, INPUTS), is_transposed=False, has_bias=has_bias))
    layer.load({"weight": randn(num_outputs, INPUTS), "bias": randn(num_outputs)}, dtype, CPU)
    return layer


def floats(num_outputs: int, dtype: torch.dtype) -> Linear:
    layer = Linear(INPUTS, num_outputs).to(dtype)
    layer.load_state_dict({"weight": randn(num_outputs, INPUTS), "bias": randn(num_outputs)})
    return layer.requires_grad_(False)


def coded(
    num_outputs: int,
    dtype: torch.dtype,
    format: WeightFormat,
    activations: Activations = Activations.none,
    has_bias: bool = True,
    permuted: bool = False,
    inputs: int = INPUTS,
) -> IntLinear | Fp8Linear:
    layout = FloatLayout((num_outputs, inputs), False, format)
    kind = Fp8Linear if format.kind is CodeKind.FP8 else IntLinear
    layer = kind("l", LinearScheme(format, activations), layout, (num_outputs, inputs), has_bias)
    weight = quantize(randn(num_outputs, inputs), format)
    if permuted:
        weight = replace(weight, permutation=torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0)))
    scale = torch.tensor(0.02) if activations is Activations.static else None
    layer.hold(StoredWeight(weight, scale), randn(num_outputs) if has_bias else None, dtype, CPU)
    return layer


TOGETHER: dict[str, Any] = {
    "dense": lambda dtype: [dense(17, dtype), dense(100, dtype, has_bias=False), dense(17, dtype)],
    "int8": lambda dtype: [coded(17, dtype, INT8), coded(100, dtype, INT8, has_bias=False), coded(17, dtype, INT8)],
    "int4": lambda dtype: [coded(17, dtype, INT4), coded(17, dtype, INT4)],
    "a8w8": lambda dtype: [coded(size, dtype, INT8, Activations.dynamic) for size in (17, 5, 17)],
}
APART: dict[str, Any] = {
    "floats": lambda dtype: [floats(17, dtype), floats(17, dtype)],
    "dense beside int8": lambda dtype: [dense(17, dtype), coded(17, dtype, INT8)],
    "int8 beside floats": lambda dtype: [coded(17, dtype, INT8), floats(17, dtype)],
    "int4 beside int8": lambda dtype: [coded(17, dtype, INT4), coded(17, dtype, INT8)],
    "a8w8 beside int8": lambda dtype: [coded(17, dtype, INT8, Activations.dynamic), coded(17, dtype, INT8)],
    "permuted": lambda dtype: [coded(17, dtype, INT4, permuted=True), coded(17, dtype, INT4, permuted=True)],
    "static": lambda dtype: [coded(17, dtype, INT8, Activations.static) for _ in range(2)],
    "fp8": lambda dtype: [coded(17, dtype, FP8, Activations.dynamic) for _ in range(2)],
}


def check(layers: list[nn.Module], dtype: torch.dtype) -> None:
    for num_rows in (1, 3, 40):
        x = randn(num_rows, INPUTS, dtype=dtype)
        alone = [layer(x) for layer in layers]
        for result, expected in zip(linear_together(x, *layers), alone, strict=True):
            assert result.dtype == dtype
            assert torch.equal(result, expected)
        gated = swiglu(alone[0], alone[-1])
        assert torch.equal(linear_swiglu(x, layers[0], layers[-1], into=floats(5, dtype)), gated)
        for down in (coded(5, dtype, format, Activations.dynamic, inputs=gated.shape[1]) for format in (INT8, FP8)):
            assert torch.equal(down(linear_swiglu(x, layers[0], layers[-1], into=down)), down(gated))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TOGETHER)
def test_layers_of_one_kind_are_one_call(name: str, dtype: torch.dtype) -> None:
    layers = TOGETHER[name](dtype)
    check(layers, dtype)
    with patch.object(type(layers[0]), "forward", side_effect=AssertionError("called alone")):
        linear_together(randn(2, INPUTS, dtype=dtype), *layers)
        linear_swiglu(randn(2, INPUTS, dtype=dtype), layers[0], layers[-1], into=floats(5, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", APART)
def test_layers_of_other_kinds_just_work(name: str, dtype: torch.dtype) -> None:
    layers = APART[name](dtype)
    assert not isinstance(layers[0], JointLinear) or not layers[0].joins(layers[1])
    check(layers, dtype)


def test_dense_layers_of_two_dtypes_do_not_join() -> None:
    assert not dense(17, torch.float32).joins(dense(17, torch.bfloat16))


DYNAMIC, AUTO = Activations.dynamic, Activations.auto
SHARED: dict[str, tuple[Any, RowCodes]] = {
    "a8w8": (TOGETHER["a8w8"], RowCodes(torch.int8)),
    "auto": (lambda dtype: [coded(17, dtype, INT4, AUTO), coded(5, dtype, INT4, AUTO)], RowCodes(torch.int8)),
    "int8 beside int4": (
        lambda dtype: [coded(17, dtype, INT8, DYNAMIC), coded(5, dtype, INT4, DYNAMIC)],
        RowCodes(torch.int8),
    ),
    "fp8": (APART["fp8"], RowCodes(torch.float8_e4m3fn)),
    "fp8, groups": (
        lambda dtype: [coded(17, dtype, FP8_GROUPS, DYNAMIC) for _ in range(3)],
        RowCodes(torch.float8_e4m3fn, 32),
    ),
}
UNSHARED: dict[str, Any] = APART | {
    "int8": TOGETHER["int8"],
    "nobody": lambda dtype: [],
    "a8w8 beside fp8": lambda dtype: [coded(17, dtype, INT8, DYNAMIC), coded(17, dtype, FP8, DYNAMIC)],
    "a8w8, one permuted": lambda dtype: [
        coded(17, dtype, INT8, DYNAMIC, permuted=permuted) for permuted in (False, True)
    ],
}
del UNSHARED["fp8"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHARED)
def test_a_norm_quantises_its_rows_once_for_all_who_read_them(name: str, dtype: torch.dtype) -> None:
    make, codes = SHARED[name]
    layers = make(dtype)
    norm, add_norm = (kind(INPUTS, 1e-5).to(dtype).requires_grad_(False) for kind in (RMSNorm, AddRMSNorm))
    for each in (norm, add_norm):
        each.weight.copy_(randn(INPUTS))
    for num_rows in (MANY_ROWS, 40):
        x, update = randn(num_rows, INPUTS, dtype=dtype), randn(num_rows, INPUTS + 1, dtype=dtype)[:, 1:]
        assert shared_row_codes(num_rows, layers) == codes
        for found, alone in (
            (norm(x, layers), norm(x)),
            (add_norm(x, None, layers)[0], norm(x)),
            (add_norm(x, update, layers)[0], add_norm(x, update)[0]),
        ):
            assert isinstance(found, QuantizedRows)
            assert found.codes.dtype == codes.dtype
            for result, layer in zip(linear_together(found, *layers), layers, strict=True):
                assert torch.equal(result, layer(alone))
            down = coded(5, dtype, INT8, DYNAMIC, inputs=17)
            gated = swiglu(layers[0](alone), layers[0](alone))
            assert torch.equal(down(linear_swiglu(found, layers[0], layers[0], into=down)), down(gated))
        assert torch.equal(add_norm(x, update, layers)[1], x + update)


@pytest.mark.parametrize("name", UNSHARED)
def test_rows_stay_floats_where_not_all_make_the_same_of_them(name: str) -> None:
    layers, x, norm = UNSHARED[name](torch.float32), randn(40, INPUTS), RMSNorm(INPUTS, 1e-5).requires_grad_(False)
    norm.weight.fill_(1)
    assert shared_row_codes(40, layers) is None
    rows = norm(x, layers)
    assert torch.equal(rows, norm(x))
    for result, layer in zip(linear_together(rows, *layers) if layers else [], layers, strict=True):
        assert torch.equal(result, layer(rows))


def test_few_rows_stay_floats_with_auto() -> None:
    layers = [coded(17, torch.float32, INT4, AUTO) for _ in range(3)]
    assert shared_row_codes(MANY_ROWS - 1, layers) is None
    assert shared_row_codes(MANY_ROWS, layers) == RowCodes(torch.int8)


def test_a_layer_whose_codes_became_floats_takes_back_such_floats_alone() -> None:
    layout = FloatLayout((5, INPUTS), False, INT8)
    layer = DequantizedLinear("l", LinearScheme(INT8), layout, (5, INPUTS), has_bias=False)
    for other in (randn(INPUTS, 5), randn(5, INPUTS, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"not \[5, 96\] of torch.float32, for its weight"):
            layer.restore({"weight": other}, torch.float32)
    weight, foreign = randn(5, INPUTS), torch.arange(INPUTS).flip(0)
    left = {"weight": weight, "permutation": foreign}
    layer.restore(left, torch.float32)
    assert left == {"permutation": foreign}  # which is nobody's, and whoever reads the file says so
    torch.testing.assert_close(layer(randn(2, INPUTS)), randn(2, INPUTS) @ weight.T)
