"""Linear layers of every method: layers that share their input give the same bits together as alone."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from conf.quantization import Activations
from kernels.quantize_rows import ActivationFormat, QuantizedActivations
from kernels.swiglu import swiglu
from models.layers.dense import DenseMethod, PackedDenseMethod, StoredFloats
from models.layers.linear import Linear, MergedLinear, shared_activations
from models.layers.norm import AddRMSNorm, RMSNorm
from quantization.codes import CodeKind
from quantization.layouts.base import StoredWeight
from quantization.layouts.floats import FloatLayout
from quantization.linear import MANY_ROWS, Dequantized, method_of
from quantization.scheme import LinearScheme
from quantization.weight_format import WeightFormat, of_blocks, quantize
from tests.helpers.cases import each

INPUTS, CPU = 192, torch.device("cpu")
INT8, INT4, FP8 = WeightFormat(8), WeightFormat(4, symmetric=False, group_size=32), WeightFormat(8, CodeKind.FP8)
NVFP4 = of_blocks("NVFP4")
FP8_GROUPS = WeightFormat(8, CodeKind.FP8, group_size=32)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def empty(num_outputs: int, dtype: torch.dtype, has_bias: bool, inputs: int = INPUTS) -> Linear:
    """Return a layer with only a bias."""
    layer = Linear(inputs, num_outputs, has_bias).requires_grad_(False)
    if layer.bias is not None:
        layer.bias.data = randn(num_outputs).to(dtype)
    return layer


def dense(num_outputs: int, dtype: torch.dtype, has_bias: bool = True) -> Linear:
    layer = empty(num_outputs, dtype, has_bias)
    layer.method = PackedDenseMethod(StoredFloats(layer.shape))
    layer.load({"weight": randn(num_outputs, INPUTS)}, dtype, CPU)
    return layer


def floats(num_outputs: int, dtype: torch.dtype) -> Linear:
    layer = empty(num_outputs, dtype, has_bias=True)
    layer.load({"weight": randn(num_outputs, INPUTS)}, dtype, CPU)
    return layer


def coded(
    num_outputs: int,
    dtype: torch.dtype,
    format: WeightFormat,
    activations: Activations = Activations.none,
    has_bias: bool = True,
    order: int | None = None,
    inputs: int = INPUTS,
    scale: float = 0.02,
) -> Linear:
    layer = empty(num_outputs, dtype, has_bias, inputs)
    method = method_of(LinearScheme(format, activations), FloatLayout(layer.shape, False, format), layer.shape)
    weight = quantize(randn(num_outputs, inputs), format)
    if order is not None:
        weight = replace(weight, permutation=torch.randperm(INPUTS, generator=torch.Generator().manual_seed(order)))
    method.hold(StoredWeight(weight, torch.tensor(scale) if activations is Activations.static else None), CPU)
    layer.method = method
    return layer


def merged(layers: Sequence[Linear]) -> MergedLinear:
    together = MergedLinear(nn.Module(), {f"part_{i}": layer for i, layer in enumerate(layers)})
    together.merge()
    return together


DYNAMIC, AUTO, STATIC = Activations.dynamic, Activations.auto, Activations.static
TOGETHER: dict[str, Any] = {
    "dense": lambda dtype: [dense(17, dtype), dense(100, dtype, has_bias=False), dense(17, dtype)],
    "int8": lambda dtype: [coded(17, dtype, INT8), coded(100, dtype, INT8, has_bias=False), coded(17, dtype, INT8)],
    "int4": lambda dtype: [coded(17, dtype, INT4), coded(17, dtype, INT4)],
    "a8w8": lambda dtype: [coded(size, dtype, INT8, DYNAMIC) for size in (17, 5, 17)],
    "static": lambda dtype: [coded(17, dtype, INT8, STATIC) for _ in range(2)],
    "fp8": lambda dtype: [coded(17, dtype, FP8, DYNAMIC) for _ in range(2)],
    "fp8 with groups": lambda dtype: [coded(17, dtype, FP8_GROUPS, DYNAMIC) for _ in range(2)],
    "fp8 weights": lambda dtype: [coded(17, dtype, FP8) for _ in range(2)],
    "static fp8": lambda dtype: [coded(17, dtype, FP8, STATIC) for _ in range(2)],
    "nvfp4": lambda dtype: [coded(size, dtype, NVFP4, DYNAMIC) for size in (17, 5, 17)],
    "nvfp4 weights": lambda dtype: [coded(size, dtype, NVFP4) for size in (17, 5, 17)],
    "one order of channels": lambda dtype: [coded(17, dtype, INT4, order=0), coded(17, dtype, INT4, order=0)],
    "one order of channels, codes": lambda dtype: [coded(17, dtype, INT8, DYNAMIC, order=0) for _ in range(2)],
}
APART: dict[str, Any] = {
    "floats": lambda dtype: [floats(17, dtype), floats(17, dtype)],
    "dense beside int8": lambda dtype: [dense(17, dtype), coded(17, dtype, INT8)],
    "int8 beside floats": lambda dtype: [coded(17, dtype, INT8), floats(17, dtype)],
    "int4 beside int8": lambda dtype: [coded(17, dtype, INT4), coded(17, dtype, INT8)],
    "a8w8 beside int8": lambda dtype: [coded(17, dtype, INT8, DYNAMIC), coded(17, dtype, INT8)],
    "two orders of channels": lambda dtype: [coded(17, dtype, INT4, order=0), coded(17, dtype, INT4, order=1)],
    "one in another order": lambda dtype: [coded(17, dtype, INT4), coded(17, dtype, INT4, order=0)],
    "two static scales": lambda dtype: [coded(17, dtype, INT8, STATIC, scale=scale) for scale in (0.02, 0.03)],
}


def check(layers: list[Linear], dtype: torch.dtype) -> None:
    first, last = layers[0], layers[-1]
    for num_rows in (1, 3, 40):
        x = randn(num_rows, INPUTS, dtype=dtype)
        alone = [layer(x, None) for layer in layers]
        for result, expected in zip(merged(layers)(x, None), alone, strict=True):
            assert result.dtype == dtype
            assert torch.equal(result, expected)
        gated = swiglu(alone[0], alone[-1])
        assert torch.equal(merged([first, last]).swiglu(x, None), gated)
        assert torch.equal(merged([first, last]).swiglu(x, None, [floats(5, dtype)]), gated)
        for format, activations in itertools.product((INT8, FP8), (DYNAMIC, STATIC)):
            down = coded(5, dtype, format, activations, inputs=gated.shape[1])
            assert torch.equal(down(merged([first, last]).swiglu(x, None, [down]), None), down(gated, None))


@each("dtype", [torch.float32, torch.bfloat16])
@each("name", TOGETHER)
def test_layers_of_one_method_are_one_call(name: str, dtype: torch.dtype) -> None:
    layers = TOGETHER[name](dtype)
    check(layers, dtype)
    together, gated = merged(layers), merged([layers[0], layers[-1]])
    with patch.object(type(layers[0].method), "apply", side_effect=AssertionError("called alone")):
        together(randn(2, INPUTS, dtype=dtype), None)
        gated.swiglu(randn(2, INPUTS, dtype=dtype), None)


@each("dtype", [torch.float32, torch.bfloat16])
@each("name", APART)
def test_layers_of_other_methods_just_work(name: str, dtype: torch.dtype) -> None:
    layers = APART[name](dtype)
    assert not merged(layers).is_merged
    check(layers, dtype)


def test_dense_layers_of_two_dtypes_do_not_merge() -> None:
    assert not merged([dense(17, torch.float32), dense(17, torch.bfloat16)]).is_merged


SHARED: dict[str, tuple[Any, ActivationFormat]] = {
    "a8w8": (TOGETHER["a8w8"], ActivationFormat(torch.int8)),
    "auto": (lambda dtype: [coded(17, dtype, INT4, AUTO), coded(5, dtype, INT4, AUTO)], ActivationFormat(torch.int8)),
    "int8 beside int4": (
        lambda dtype: [coded(17, dtype, INT8, DYNAMIC), coded(5, dtype, INT4, DYNAMIC)],
        ActivationFormat(torch.int8),
    ),
    "static": (TOGETHER["static"], ActivationFormat(torch.int8)),
    "fp8": (TOGETHER["fp8"], ActivationFormat(torch.float8_e4m3fn)),
    "static fp8": (TOGETHER["static fp8"], ActivationFormat(torch.float8_e4m3fn)),
    "fp8, groups": (
        lambda dtype: [coded(17, dtype, FP8_GROUPS, DYNAMIC) for _ in range(3)],
        ActivationFormat(torch.float8_e4m3fn, 32),
    ),
}
UNSHARED: dict[str, Any] = APART | {
    "int8": TOGETHER["int8"],
    "fp8 weights": TOGETHER["fp8 weights"],
    "one order of channels, codes": TOGETHER["one order of channels, codes"],
    "nobody": lambda dtype: [],
    "a8w8 beside fp8": lambda dtype: [coded(17, dtype, INT8, DYNAMIC), coded(17, dtype, FP8, DYNAMIC)],
    "a8w8, one permuted": lambda dtype: [coded(17, dtype, INT8, DYNAMIC, order=order) for order in (None, 0)],
}


@each("dtype", [torch.float32, torch.bfloat16])
@each("name", SHARED)
def test_a_norm_quantises_its_rows_once_for_all_who_read_them(name: str, dtype: torch.dtype) -> None:
    make, format = SHARED[name]
    layers = make(dtype)
    together = merged(layers)
    norm, add_norm = (kind(INPUTS, 1e-5).to(dtype).requires_grad_(False) for kind in (RMSNorm, AddRMSNorm))
    for layer in (norm, add_norm):
        layer.weight.copy_(randn(INPUTS))
    for num_rows in (MANY_ROWS, 40):
        x, update = randn(num_rows, INPUTS, dtype=dtype), randn(num_rows, INPUTS + 1, dtype=dtype)[:, 1:]
        shared = shared_activations(num_rows, layers)
        assert shared is not None
        assert shared[:2] == format[:2]
        assert (shared.static_scales is not None) == ("static" in name)
        for joint, alone in (
            (norm(x, layers), norm(x)),
            (add_norm(x, None, layers)[0], norm(x)),
            (add_norm(x, update, layers)[0], add_norm(x, update)[0]),
        ):
            assert isinstance(joint, QuantizedActivations)
            assert joint.codes.dtype == format.dtype
            for result, layer in zip(together(joint, None), layers, strict=True):
                assert torch.equal(result, layer(alone, None))
            down = coded(5, dtype, INT8, DYNAMIC, inputs=17)
            gated = swiglu(layers[0](alone, None), layers[0](alone, None))
            result = merged([layers[0], layers[0]]).swiglu(joint, None, [down])
            assert torch.equal(down(result, None), down(gated, None))
        assert torch.equal(add_norm(x, update, layers)[1], x + update)


@each("name", UNSHARED)
def test_rows_stay_floats_where_not_all_make_the_same_of_them(name: str) -> None:
    layers, x, norm = UNSHARED[name](torch.float32), randn(40, INPUTS), RMSNorm(INPUTS, 1e-5).requires_grad_(False)
    norm.weight.fill_(1)
    assert shared_activations(40, layers) is None
    rows = norm(x, layers)
    assert torch.equal(rows, norm(x))
    for result, layer in zip(merged(layers)(rows, None) if layers else [], layers, strict=True):
        assert torch.equal(result, layer(rows, None))


def test_few_rows_stay_floats_with_auto() -> None:
    layers = [coded(17, torch.float32, INT4, AUTO) for _ in range(3)]
    assert shared_activations(MANY_ROWS - 1, layers) is None
    assert shared_activations(MANY_ROWS, layers) == ActivationFormat(torch.int8)


METHODS: dict[str, Any] = {
    "floats": lambda: floats(70, torch.float32),
    "dense": lambda: dense(70, torch.float32),
    "dense in 12 bits": lambda: dense(70, torch.bfloat16),
    "int8": lambda: coded(70, torch.float32, INT8, DYNAMIC),
    "int4 with zero points": lambda: coded(70, torch.float32, INT4),
    "int4, permuted": lambda: coded(70, torch.float32, INT4, order=0),
    "static": lambda: coded(70, torch.float32, INT8, STATIC),
    "fp8": lambda: coded(70, torch.float32, FP8, DYNAMIC),
    "fp8 per tensor": lambda: coded(70, torch.float32, replace(FP8, per_tensor=True)),
    "fp8, groups": lambda: coded(70, torch.float32, FP8_GROUPS, DYNAMIC),
    "nvfp4": lambda: coded(70, torch.float32, NVFP4),
}


@each("name", METHODS)
def test_a_cut_gives_a_range_of_the_outputs(name: str) -> None:
    layer = METHODS[name]()
    dtype = layer.bias.dtype
    for num_rows in (1, 40):
        x = randn(num_rows, INPUTS, dtype=dtype)
        expected = layer.method.apply(x, None)
        for outputs in (slice(0, 70), slice(0, 16), slice(5, 6), slice(33, 70)):
            assert torch.equal(layer.method.slice_outputs(outputs).apply(x, None), expected[:, outputs])


@each("name", METHODS)
def test_a_method_restores_what_it_held(name: str) -> None:
    layer, other = METHODS[name](), METHODS[name]()
    dtype = layer.bias.dtype
    held = {tensor_name: tensor.clone() for tensor_name, tensor in layer.method.held.items()}
    assert set(held) == set(layer.state_dict()) - {"bias"}
    other.restore({**held, "bias": layer.bias.data.clone()}, dtype)
    x = randn(3, INPUTS, dtype=dtype)
    assert torch.equal(other(x, None), layer(x, None))
    for missing in held:
        if missing != "permutation":  # only the file tells whether there is one
            with pytest.raises(KeyError, match=missing):
                other.method.restore(
                    {tensor_name: part for tensor_name, part in held.items() if tensor_name != missing}, dtype
                )


def test_a_layer_has_the_tensors_of_its_method_alone() -> None:
    layer = floats(5, torch.float32)
    method = layer.method
    assert set(layer.state_dict()) == {"weight", "bias"}
    layer.method = coded(5, torch.float32, INT8, STATIC).method
    assert set(layer.state_dict()) == {"packed", "input_scale", "bias"}
    assert [name for name, _ in layer.named_parameters()] == ["bias", "packed"]
    layer.method = method
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_a_layer_whose_codes_became_floats_takes_back_such_floats_alone() -> None:
    layer = Linear(INPUTS, 5, bias=False)
    layer.method = DenseMethod(Dequantized(FloatLayout((5, INPUTS), False, INT8), (5, INPUTS)))
    for other in (randn(INPUTS, 5), randn(5, INPUTS, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=rf"not \[5, {INPUTS}\] of torch.float32, for its weight"):
            layer.restore({"weight": other}, torch.float32)
    weight, foreign = randn(5, INPUTS), torch.arange(INPUTS).flip(0)
    left = {"weight": weight, "permutation": foreign}
    layer.restore(left, torch.float32)
    assert left == {"permutation": foreign}  # it belongs to no layer, and the file's reader reports it
    torch.testing.assert_close(layer(randn(2, INPUTS), None), randn(2, INPUTS) @ weight.T)
