"""Products with packed weights: floating-point, integer, float8 or ggml blocks. M rows, K inputs, N outputs."""

from collections.abc import Sequence
from ctypes import Array, c_bool, c_void_p
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.linear import portable
from kernels.linear.block_weight import UNIT, BlockWeight
from kernels.linear.float8_weight import Float8Weight
from kernels.linear.float_weight import FloatWeight
from kernels.linear.int_weight import CODES, IntWeight
from kernels.operator import Parts, UnsupportedArguments, operator
from kernels.quantize_rows import Activations, QuantizedActivations
from kernels.swiglu import swiglu

MAX_TOGETHER = 3  # weights that one call can multiply: queries, keys and values

PackedWeight: TypeAlias = FloatWeight | IntWeight | Float8Weight | BlockWeight
Biases: TypeAlias = Sequence[Tensor | None]

NO_WEIGHTS = [(None, False, None, None, 0) * (MAX_TOGETHER - count) for count in range(MAX_TOGETHER + 1)]
"""Arguments for the missing weights of a call, indexed by the number of weights present."""
FLOATS = (0, CODES["none"], False)  # group size, codes and zero points of a floating-point weight


class WeightGroup:
    """Weights of one shape and format, each multiplied by its own rows. Raises ValueError if shapes or formats differ."""

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self.weights = tuple(weights)
        self.first = weights[0]
        kinds = {(w.num_outputs, w.num_inputs, w.format) for w in weights}
        if len(kinds) > 1:
            raise ValueError(f"weights of several shapes or formats cannot share a product: {kinds}")

    @cached_property
    def addresses(self) -> "Array[c_void_p]":
        return (c_void_p * len(self.weights))(*[weight.memory.data_ptr() for weight in self.weights])

    @cached_property
    def are_compressed(self) -> "Array[c_bool]":
        return (c_bool * len(self.weights))(*[weight.is_compressed for weight in self.weights])


def _row_parts(x: Activations) -> tuple[Tensor, Tensor | None, torch.dtype, int | None]:
    if isinstance(x, QuantizedActivations):
        return x.codes, x.scales, x.dtype, x.group_size
    return x, None, x.dtype, None


def _make_rows(codes: Tensor, scales: Tensor | None, dtype: torch.dtype, group_size: int | None) -> Activations:
    return codes if scales is None else QuantizedActivations(codes, scales, dtype, group_size)


def _weight_parts(weight: PackedWeight) -> tuple[Tensor, int, int, int, int, bool]:
    return weight.memory, weight.num_outputs, weight.num_inputs, *_format_numbers(weight)


def _make_weight(
    memory: Tensor, num_outputs: int, num_inputs: int, group_size: int, codes: int, has_zero_points: bool
) -> PackedWeight:
    if codes == CODES["none"]:
        return FloatWeight(memory, num_outputs, num_inputs)
    if codes == CODES["float8"]:
        return Float8Weight(memory, num_outputs, num_inputs, group_size)
    if codes >= CODES["q4_1"]:
        return BlockWeight(memory, num_outputs, num_inputs, list(CODES)[codes].upper())
    bits = 8 if codes == CODES["int8"] else 4
    return IntWeight(memory, num_outputs, num_inputs, group_size, bits, has_zero_points)


def _group_parts(group: WeightGroup | None) -> tuple[list[Tensor], int, int, int, int, bool]:
    if group is None:
        return [], 0, 0, *FLOATS
    first = group.first
    return [w.memory for w in group.weights], first.num_outputs, first.num_inputs, *_format_numbers(first)


def _make_group(
    memories: Sequence[Tensor], num_outputs: int, num_inputs: int, group_size: int, codes: int, has_zero_points: bool
) -> WeightGroup | None:
    return (
        WeightGroup(
            [_make_weight(memory, num_outputs, num_inputs, group_size, codes, has_zero_points) for memory in memories]
        )
        if memories
        else None
    )


ROWS, WEIGHT, GROUP = (
    Parts(_row_parts, _make_rows),
    Parts(_weight_parts, _make_weight),
    Parts(_group_parts, _make_group),
)


def _empty_products(x: Activations, weights: Sequence[PackedWeight], *_: Any) -> list[Tensor]:
    rows = x.codes if isinstance(x, QuantizedActivations) else x
    return [rows.new_empty(rows.shape[0], weight.num_outputs, dtype=x.dtype) for weight in weights]


def _empty_product(x: Activations, gate: PackedWeight, *_: Any) -> Tensor:
    return _empty_products(x, [gate])[0]


def _check(x: Activations, weights: Sequence[PackedWeight], biases: Biases) -> None:
    if len(weights) > MAX_TOGETHER:
        raise ValueError(f"{len(weights)} weights: at most {MAX_TOGETHER} are multiplied together")
    shape, dtype, format = x.shape, x.dtype, weights[0].format
    are_floats, are_codes = isinstance(weights[0], FloatWeight), isinstance(x, QuantizedActivations)
    if dtype not in DTYPES:
        raise ValueError(f"no product computes in {dtype}, only in {', '.join(map(str, DTYPES))}")
    if are_floats and (are_codes or dtype != format):
        raise ValueError(
            f"{'codes for ' if are_codes else ''}rows of {dtype} cannot be multiplied by a weight of {format}"
        )
    if isinstance(x, QuantizedActivations):
        _check_codes(x, weights[0])
    for weight, bias in zip(weights, biases, strict=True):
        if len(shape) != 2 or shape[1] != weight.num_inputs:
            raise ValueError(f"rows {list(shape)} cannot be multiplied by a weight of {weight.num_inputs} inputs")
        if weight.format != format:
            raise ValueError(f"weights of {format} and {weight.format} cannot be multiplied together")
        if x.is_cpu != weight.memory.is_cpu:
            device = x.codes.device if isinstance(x, QuantizedActivations) else x.device
            raise ValueError(f"rows on {device} and a weight on {weight.memory.device}")
        if bias is not None and (
            bias.shape != (weight.num_outputs,)
            or bias.dtype != dtype
            or not bias.is_contiguous()
            or bias.is_cpu != x.is_cpu
        ):
            raise ValueError(
                f"a bias {list(bias.shape)} of {bias.dtype} for {weight.num_outputs} outputs of {dtype}, side by side"
            )


def _check_codes(x: QuantizedActivations, weight: PackedWeight) -> None:
    if isinstance(weight, Float8Weight) != (x.codes.dtype == torch.float8_e4m3fn) or not x.codes.itemsize == 1:
        raise ValueError(
            f"rows of {x.codes.dtype}: weights of integers are multiplied by floats or int8, of float8 by floats or float8"
        )
    is_blocks = isinstance(weight, BlockWeight)
    allowed = [(len(x), weight.num_inputs // UNIT)] if is_blocks else [(1, 1), (len(x), 1)]
    if isinstance(weight, Float8Weight) and x.group_size is not None and x.group_size % weight.group_size == 0:
        allowed.append((len(x), -(-weight.num_inputs // x.group_size)))
    if tuple(x.scales.shape) not in allowed:
        rule = f"one for {UNIT} inputs" if is_blocks else "one of each, or [1, 1] of all"
        raise ValueError(f"scales {list(x.scales.shape)} for {len(x)} rows: {rule}")
    if x.scales.dtype != torch.float32 or x.scales.is_cpu != x.is_cpu:
        raise ValueError(f"scales of {x.scales.dtype} on {x.scales.device}: they are float32, where the codes are")


def _matmul_together(x: Activations, weights: Sequence[PackedWeight], biases: Biases) -> list[Tensor]:
    return [portable.matmul(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@operator(
    _matmul_together,
    fake=_empty_products,
    check=_check,
    parts={"x": ROWS, "weights": replace(WEIGHT, is_list=True)},
)
def matmul_together(cpp: Library, x: Activations, weights: Sequence[PackedWeight], biases: Biases) -> list[Tensor]:
    """Return x times each weight transposed, plus its bias [N]: [M, N] each, bit-identical to `matmul` with that
    weight.

    Raises ValueError if shapes or dtypes do not match, if the weights have different formats, and for more than
    MAX_TOGETHER weights.
    """
    if not x.is_cpu:
        raise UnsupportedArguments
    outs = []
    arguments: list[int | None] = []
    for weight, bias in zip(weights, biases, strict=True):
        out = torch.empty(len(x), weight.num_outputs, dtype=x.dtype)
        bias_at = None if bias is None else bias.data_ptr()
        arguments += (weight.memory.data_ptr(), weight.is_compressed, bias_at, out.data_ptr(), weight.num_outputs)
        outs.append(out)
    arguments += NO_WEIGHTS[len(weights)]
    x, rows = _rows(x, weights[0])
    cpp.matmul(*rows, *x.shape, *_format_numbers(weights[0]), *arguments)
    return outs


def _check_swiglu(
    x: Activations, gate: PackedWeight, up: PackedWeight, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> None:
    if gate.num_outputs != up.num_outputs:
        raise ValueError(f"a gate of {gate.num_outputs} outputs for {up.num_outputs}")
    _check(x, (gate, up), (gate_bias, up_bias))


def _matmul_swiglu(
    x: Activations, gate: PackedWeight, up: PackedWeight, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Tensor:
    return swiglu(portable.matmul(x, gate, gate_bias), portable.matmul(x, up, up_bias))


@operator(_matmul_swiglu, fake=_empty_product, check=_check_swiglu, parts={"x": ROWS, "gate": WEIGHT, "up": WEIGHT})
def matmul_swiglu(
    cpp: Library,
    x: Activations,
    gate: PackedWeight,
    up: PackedWeight,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """Return silu(x gate^T + gate_bias) * (x up^T + up_bias): [M, N], bit-identical to `swiglu` of the two products.

    Raises ValueError as `matmul_together` does, and if gate and up have different numbers of outputs.
    """
    if not x.is_cpu:
        raise UnsupportedArguments
    out, (x, rows) = torch.empty(len(x), gate.num_outputs, dtype=x.dtype), _rows(x, gate)
    cpp.matmul_swiglu(
        *rows,
        *x.shape,
        *_format_numbers(gate),
        gate.memory.data_ptr(),
        gate.is_compressed,
        None if gate_bias is None else gate_bias.data_ptr(),
        up.memory.data_ptr(),
        up.is_compressed,
        None if up_bias is None else up_bias.data_ptr(),
        out.data_ptr(),
        gate.num_outputs,
    )
    return out


def _check_grouped(
    x: Activations,
    weights: WeightGroup,
    starts: Tensor,
    ups: WeightGroup | None = None,
    biases: Tensor | None = None,
) -> None:
    first, count = weights.first, len(weights.weights)
    _check(x, [first], [None])
    if (starts.shape, starts.dtype) != ((count + 1,), torch.int64):
        raise ValueError(f"starts {list(starts.shape)} of {starts.dtype} for {count} weights")
    if isinstance(x, QuantizedActivations) and len(x.scales) != len(x):
        raise ValueError(f"{len(x.scales)} scale for {len(x)} rows: grouped weights need one scale per row")
    if biases is not None:
        _check_biases(x, weights, ups, biases)
    if ups is None:
        return
    _check(x, [first, ups.first], [None, None])
    if (len(ups.weights), ups.first.num_outputs) != (count, first.num_outputs):
        gate_text, up_text = (f"{len(group.weights)} of {group.first.num_outputs} outputs" for group in (weights, ups))
        raise ValueError(f"gates {gate_text}, but ups {up_text}")


def _check_biases(x: Activations, weights: WeightGroup, ups: WeightGroup | None, biases: Tensor) -> None:
    if ups is not None:
        raise ValueError("biases of gates are not supported: leave out ups or biases")
    shape = len(weights.weights), weights.first.num_outputs
    if biases.shape != shape or biases.dtype != x.dtype or not biases.is_contiguous() or biases.is_cpu != x.is_cpu:
        raise ValueError(f"biases {list(biases.shape)} of {biases.dtype}, not {list(shape)} of {x.dtype}, side by side")


def _grouped_matmul(
    x: Activations,
    weights: WeightGroup,
    starts: Tensor,
    ups: WeightGroup | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    ends, outs = starts.tolist(), []
    width = weights.first.num_outputs
    before, after = (torch.empty(num_rows, width, dtype=x.dtype) for num_rows in (ends[0], len(x) - ends[-1]))
    for i, weight in enumerate(weights.weights):
        rows = slice(ends[i], ends[i + 1])
        part = (
            replace(x, codes=x.codes[rows], scales=x.scales[rows]) if isinstance(x, QuantizedActivations) else x[rows]
        )
        y = portable.matmul(part, weight, None if biases is None else biases[i])
        outs.append(y if ups is None else swiglu(y, portable.matmul(part, ups.weights[i], None)))
    return torch.cat([before, *outs, after])


def _empty_grouped(x: Activations, weights: WeightGroup, *_: Any) -> Tensor:
    return _empty_products(x, [weights.first])[0]


@operator(_grouped_matmul, fake=_empty_grouped, check=_check_grouped, parts={"x": ROWS, "weights": GROUP, "ups": GROUP})
def grouped_matmul(
    cpp: Library,
    x: Activations,
    weights: WeightGroup,
    starts: Tensor,
    ups: WeightGroup | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Return [M, N] in x's dtype: rows starts[i] to starts[i + 1] - 1 of x [M, K] times weight number i transposed.

    Int8 rows have one scale each. With `ups` the weights are gates, as in `matmul_swiglu`. Without `ups`, biases
    [weights, N] of x's dtype are added. starts int64 [weights + 1]
    is on the CPU, with values from 0 to M. Rows before starts[0] and from starts[-1] on are undefined. The result is
    bit-identical to `matmul` and `matmul_swiglu`. A weight without rows is not read.

    Raises ValueError as `matmul` and `matmul_swiglu` do.
    """
    if not x.is_cpu:
        raise UnsupportedArguments
    first = weights.first
    starts, out = starts.contiguous(), torch.empty(len(x), first.num_outputs, dtype=x.dtype)
    x, rows = _rows(x, first)
    scales_apart = rows[2] if isinstance(x, Tensor) else x.scales.shape[1]  # not 0 even if there is only one row
    cpp.grouped_matmul(
        *rows[:2],
        scales_apart,
        rows[3],
        first.num_inputs,
        *_format_numbers(first),
        weights.addresses,
        weights.are_compressed,
        *((None, None) if ups is None else (ups.addresses, ups.are_compressed)),
        None if biases is None else biases.data_ptr(),
        starts.data_ptr(),
        out.data_ptr(),
        len(weights.weights),
        first.num_outputs,
    )
    return out


def _check_per_head(x: Tensor, weights: WeightGroup) -> None:
    if x.ndim != 3 or x.shape[1] != len(weights.weights):
        raise ValueError(f"rows {list(x.shape)} for the weights of {len(weights.weights)} heads")
    _check(x[:, 0], [weights.first], [None])


def _matmul_per_head(x: Tensor, weights: WeightGroup) -> Tensor:
    heads = zip(x.unbind(1), weights.weights, strict=True)
    return torch.stack([portable.matmul(rows, weight, None) for rows, weight in heads], dim=1)


def _empty_per_head(x: Tensor, weights: WeightGroup) -> Tensor:
    return x.new_empty(*x.shape[:2], weights.first.num_outputs)


@operator(_matmul_per_head, fake=_empty_per_head, check=_check_per_head, parts={"weights": GROUP})
def matmul_per_head(cpp: Library, x: Tensor, weights: WeightGroup) -> Tensor:
    """Return every head's x [M, H, K] times its own floating-point weight [N, K] transposed: [M, H, N], bit-identical
    to `matmul`.

    Raises ValueError as `matmul` does, and if the number of heads differs.
    """
    first = weights.first
    if not x.is_cpu or not isinstance(first, FloatWeight):
        raise UnsupportedArguments
    x = x.transpose(0, 1).contiguous()  # [H, M, K]
    out = torch.empty(*x.shape[:2], first.num_outputs, dtype=x.dtype)
    cpp.matmul_per_head(
        x.data_ptr(),
        DTYPES[x.dtype],
        *x.shape,
        weights.addresses,
        weights.are_compressed,
        out.data_ptr(),
        first.num_outputs,
    )
    return out.transpose(0, 1)


def _rows(x: Activations, weight: PackedWeight) -> tuple[Activations, tuple[int, int | None, int, int]]:
    """Return contiguous rows and their C++ arguments: addresses of rows and scales, stride of the scales, number of the
    dtype.

    Rows quantised in groups get one scale per group of the weight.
    """
    if not isinstance(x, QuantizedActivations):
        x = x.contiguous()
        return x, (x.data_ptr(), None, 0, DTYPES[x.dtype])
    num_scales = x.scales.shape[1]
    if num_scales > 1 and isinstance(weight, Float8Weight) and num_scales != weight.num_groups:
        assert x.group_size is not None
        x = replace(x, scales=x.scales.repeat_interleave(x.group_size // weight.group_size, 1)[:, : weight.num_groups])
    if not (x.codes.is_contiguous() and x.scales.is_contiguous()):
        x = replace(x, codes=x.codes.contiguous(), scales=x.scales.contiguous())
    return x, (x.codes.data_ptr(), x.scales.data_ptr(), _scales_apart(x.scales), DTYPES[x.dtype])


def _scales_apart(scales: Tensor) -> int:
    """Return the distance between the scales of two rows; 0 if all rows share one scale."""
    return scales.shape[1] if scales.numel() > 1 else 0


def _format_numbers(weight: PackedWeight) -> tuple[int, int, bool]:
    """Return the group size, the number of the codes, and whether the weight has zero points."""
    if isinstance(weight, FloatWeight):
        return FLOATS
    if isinstance(weight, Float8Weight):
        return weight.group_size, CODES["float8"], False
    if isinstance(weight, BlockWeight):
        return weight.format.group_size, CODES[weight.format.codes], weight.format.has_zero_points
    return weight.group_size, CODES["int8" if weight.bits == 8 else "int4"], weight.has_zero_points


def _check_take(weight: PackedWeight, numbers: Tensor, dtype: torch.dtype) -> None:
    if isinstance(weight, FloatWeight) and weight.dtype != dtype or dtype not in DTYPES:
        raise ValueError(f"rows of {dtype} from a weight of {weight.format}")
    if numbers.ndim != 1 or numbers.dtype != torch.int64 or numbers.is_cpu != weight.memory.is_cpu:
        raise ValueError(
            f"row numbers {list(numbers.shape)} of {numbers.dtype} on {numbers.device}: int64 [M] is needed"
        )


def _empty_rows(weight: PackedWeight, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers.new_empty(numbers.shape[0], weight.num_inputs, dtype=dtype)


@operator(portable.take_rows, fake=_empty_rows, check=_check_take, parts={"weight": WEIGHT})
def take_rows(cpp: Library, weight: PackedWeight, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `numbers` int64 [M] of the weight: [M, K] in `dtype`, each value rounded once.

    A number outside the weight gives a row of NaN. Raises ValueError for another shape or dtype of `numbers`, and for
    a FloatWeight of another dtype.
    """
    if not weight.memory.is_cpu:
        raise UnsupportedArguments
    numbers, out = numbers.contiguous(), torch.empty(len(numbers), weight.num_inputs, dtype=dtype)
    cpp.take_rows(
        weight.memory.data_ptr(),
        weight.is_compressed,
        *_format_numbers(weight),
        weight.num_outputs,
        weight.num_inputs,
        numbers.data_ptr(),
        len(numbers),
        DTYPES[dtype],
        out.data_ptr(),
    )
    return out
