"""A range of outputs of a stored weight equals these rows of the whole weight, in every layout, at any word or block
boundary."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations
from models.sharding import count
from quantization.codes import CodeKind
from quantization.layouts.awq import AwqWeight
from quantization.layouts.base import StoredWeight, WeightLayout, WritableLayout
from quantization.layouts.compressed_tensors import CompressedWeight, writable_layout
from quantization.layouts.floats import FloatLayout
from quantization.layouts.fp8 import Fp8Weight
from quantization.layouts.gguf import GGUFWeight
from quantization.layouts.gptq import GptqWeight
from quantization.layouts.sharded import ShardedLayout
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat, of_blocks, quantize
from tests.helpers.cases import each

SHAPE = 80, 64
HALF = torch.float16
INT4, INT4_ZEROS = (
    WeightFormat(4, group_size=16, scale_dtype=HALF),
    WeightFormat(4, symmetric=False, group_size=16, scale_dtype=HALF),
)
MXFP4, NVFP4 = of_blocks("MXFP4"), of_blocks("NVFP4")
INT8, FP8 = WeightFormat(8, scale_dtype=HALF), WeightFormat(8, CodeKind.FP8)


def weight() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def written(
    layout: WritableLayout, format: WeightFormat, is_permuted: bool = False
) -> tuple[WeightLayout, dict[str, Tensor]]:
    stored = quantize(weight(), format)
    if is_permuted:
        stored = replace(stored, permutation=torch.randperm(SHAPE[1], generator=torch.Generator().manual_seed(1)))
    scale = (
        torch.tensor(0.5)
        if isinstance(layout, CompressedWeight) and layout.scheme.activations is Activations.static
        else None
    )
    return layout, layout.write(StoredWeight(stored, scale))


def compressed(
    format: WeightFormat, activations: Activations = Activations.none, is_permuted: bool = False
) -> tuple[WeightLayout, dict[str, Tensor]]:
    scheme, shapes = LinearScheme(format, activations), {"weight_g_idx": SHAPE[1:]} if is_permuted else {}
    return written(writable_layout(SHAPE, scheme, shapes), format, is_permuted)


def blocks() -> tuple[WeightLayout, dict[str, Tensor]]:
    codes = weight().to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)) + 0.5  # the last block has 16 rows
    return Fp8Weight(SHAPE, (32, 32), False, {}), {"weight": codes, "weight_scale_inv": scales}


def one_scale() -> tuple[WeightLayout, dict[str, Tensor]]:
    shapes = {"weight_scale": (), "input_scale": ()}
    tensors = {
        "weight": weight().to(torch.float8_e4m3fn),
        "weight_scale": torch.tensor(0.25),
        "input_scale": torch.tensor(2.0),
    }
    return Fp8Weight(SHAPE, None, True, shapes), tensors  # type: ignore[arg-type]


def gguf() -> tuple[WeightLayout, dict[str, Tensor]]:
    stored = quantize(weight(), WeightFormat(8, group_size=32, scale_dtype=HALF))
    parts = (stored.scales.half()[:, :, None].view(torch.int8), stored.codes.unflatten(1, (-1, 32)))
    blocks = torch.cat(parts, 2).flatten(1).view(torch.uint8)
    return GGUFWeight("Q8_0", SHAPE, keeps_blocks=False), {"blocks": blocks}


LAYOUTS: dict[str, Callable[[], tuple[WeightLayout, dict[str, Tensor]]]] = {
    "floats": lambda: (FloatLayout(SHAPE, False, INT4), {"weight": weight()}),
    "floats, Conv1D": lambda: (FloatLayout(SHAPE, True, INT8), {"weight": weight().T.contiguous()}),
    "floats, one scale": lambda: (FloatLayout(SHAPE, False, replace(FP8, per_tensor=True)), {"weight": weight()}),
    "floats, mxfp4": lambda: (FloatLayout(SHAPE, False, MXFP4), {"weight": weight()}),
    "floats, nvfp4": lambda: (FloatLayout(SHAPE, False, NVFP4), {"weight": weight()}),
    "compressed mxfp4": lambda: compressed(MXFP4),
    "compressed nvfp4": lambda: compressed(NVFP4),
    "compressed int4": lambda: compressed(INT4),
    "compressed int4, zero points": lambda: compressed(INT4_ZEROS),
    "compressed int4, act-order": lambda: compressed(INT4, is_permuted=True),
    "compressed int8": lambda: compressed(INT8),
    "compressed a8w8": lambda: compressed(INT8, Activations.static),
    "compressed int8, one scale": lambda: compressed(replace(INT8, per_tensor=True), Activations.dynamic),
    "compressed fp8": lambda: compressed(FP8, Activations.dynamic),
    "compressed fp8, one scale": lambda: compressed(replace(FP8, per_tensor=True), Activations.static),
    "gptq": lambda: written(GptqWeight(SHAPE, INT4, True), INT4),
    "gptq, act-order": lambda: written(GptqWeight(SHAPE, INT4, True), INT4, is_permuted=True),
    "gptq v2, zero points": lambda: written(GptqWeight(SHAPE, INT4_ZEROS, False), INT4_ZEROS),
    "gptq int8": lambda: written(GptqWeight(SHAPE, INT8, True), INT8),
    "awq": lambda: written(AwqWeight(SHAPE, INT4), INT4),
    "awq, zero points": lambda: written(AwqWeight(SHAPE, INT4_ZEROS), INT4_ZEROS),
    "fp8 blocks": blocks,
    "fp8, one scale": one_scale,
    "gguf": gguf,
}  # fmt: skip


def rows(weight: QuantizedWeight, outputs: list[int]) -> QuantizedWeight:
    scales = weight.scales[outputs] if len(weight.scales) > 1 else weight.scales
    zero_points = None if weight.zero_points is None else weight.zero_points[outputs]
    return replace(weight, codes=weight.codes[outputs], scales=scales, zero_points=zero_points)


def assert_same(actual: StoredWeight, expected: StoredWeight, outputs: list[int]) -> None:
    actual_weight, part = actual.weight, rows(expected.weight, outputs)
    for name, tensor in vars(part).items():
        if isinstance(tensor, Tensor):
            assert getattr(actual_weight, name).float().equal(tensor.float()), name
        else:
            assert getattr(actual_weight, name) == tensor, name
    assert actual.input_scale == expected.input_scale


def two_ranges(ends: list[int]) -> tuple[range, ...]:
    first, second, third, fourth = sorted(ends)
    return tuple(indices for indices in (range(first, second), range(third, fourth)) if indices)


RANGES = st.lists(st.integers(0, SHAPE[0]), min_size=4, max_size=4).map(two_ranges).filter(bool)


@pytest.mark.long
@each("name", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(outputs=RANGES)
def test_any_ranges_of_outputs(name: str, outputs: tuple[range, ...]) -> None:
    layout, tensors = LAYOUTS[name]()
    shared = ShardedLayout(layout, outputs)
    shards = shared.shards()
    parts = {
        stored: torch.cat(
            [tensor.narrow(shards[stored].axis, part.start, len(part)) for part in shards[stored].ranges],
            shards[stored].axis,
        )
        if stored in shards
        else tensor
        for stored, tensor in tensors.items()
    }
    assert {name: tuple(part.shape) for name, part in parts.items()} == shared.tensors()
    assert shared.shape == (count(outputs), SHAPE[1])
    actual, expected = shared.read(parts), layout.read(tensors)
    assert_same(actual, expected, [output for indices in outputs for output in indices])


def test_no_more_is_read_than_the_words_and_blocks_that_hold_the_outputs() -> None:
    shards = {name: ShardedLayout(LAYOUTS[name]()[0], (range(10, 25),)).shards() for name in LAYOUTS}
    exact, words, block = (range(10, 25),), (range(1, 4),), (range(1),)
    assert {name: cut.ranges for name, cut in shards["awq"].items()} == {
        "qweight": words,
        "qzeros": words,
        "scales": exact,
    }
    assert {name: cut.ranges for name, cut in shards["fp8 blocks"].items()} == {
        "weight": exact,
        "weight_scale_inv": block,
    }
    assert (
        shards["floats, one scale"] == shards["floats, nvfp4"] == {}
    )  # its scale is computed from the largest number of all
    assert "weight_shape" not in shards["compressed int4"]
    assert shards["floats, Conv1D"]["weight"].axis == 1


def test_a_wrong_whole_shape_is_still_seen() -> None:
    layout, tensors = LAYOUTS["compressed int4"]()
    shared = ShardedLayout(layout, (range(16),))
    parts = {name: tensor if name == "weight_shape" else tensor[:16] for name, tensor in tensors.items()}
    shared.read(parts)
    with pytest.raises(UserError, match=r"weight_shape is \[80, 63\], expected \[80, 64\]"):
        shared.read(parts | {"weight_shape": torch.tensor([80, 63])})
