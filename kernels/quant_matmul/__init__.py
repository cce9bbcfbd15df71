"""Matrix product with a quantised weight: 8 or 4 bits, a scale for each output or for each group of its inputs.

M rows, K inputs, N outputs. With the C++ kernels a row's result does not depend on the other rows or on the number of threads, to the bit.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels import build
from kernels.custom_op import Parts, custom_op
from kernels.matmul import MAX_TOGETHER
from kernels.quant_matmul import float8, gpu_weight, packed, portable
from kernels.quant_matmul.float8 import Float8Weight
from kernels.quant_matmul.gpu_weight import GPUWeight
from kernels.quant_matmul.packed import PackedWeight, PackedWeights, known_group_size
from kernels.quantize_rows import QuantizedRows, Rows
from kernels.swiglu import swiglu

__all__ = [
    "Float8Weight",
    "GPUWeight",
    "PackedWeight",
    "PackedWeights",
    "grouped_quant_matmul",
    "pack",
    "pack_float8",
    "quant_matmul",
    "quant_matmul_swiglu",
    "quant_matmul_together",
]


def pack(codes: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int) -> PackedWeight | GPUWeight:
    """The form that the kernels of the codes' device read. codes int8 [N, K] and the rest as `packed.pack` says, ValueErrors too."""
    if _on_gpu(codes):
        return gpu_weight.pack(codes, scales, zero_points, bits)
    return packed.pack(codes, scales, zero_points, bits)


def pack_float8(codes: Tensor, scales: Tensor) -> Float8Weight | GPUWeight:
    """The same for codes float8_e4m3fn [N, K] and scales float32 [N, G], of groups of one size, or [1, 1] for the whole weight.

    A CPU has no kernels for them, nor has a GPU for groups of other than 32, 64, 128 or all inputs: there codes stay as they are.
    """
    if _on_gpu(codes) and known_group_size(codes.shape[1], scales.shape[1]) is not None:
        return gpu_weight.pack(codes, scales, None, 8)
    return Float8Weight(codes.clone(), scales.clone())


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _row_parts(x: Rows) -> tuple[Tensor, Tensor | None, torch.dtype]:
    return (x.codes, x.scales, x.dtype) if isinstance(x, QuantizedRows) else (x, None, x.dtype)


def _rows(codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Rows:
    return codes if scales is None else QuantizedRows(codes, scales, dtype)


def _empty_products(x: Rows, weights: Sequence[PackedWeight], *_: Any) -> list[Tensor]:
    rows = x.codes if isinstance(x, QuantizedRows) else x
    return [rows.new_empty(rows.shape[0], weight.num_outputs, dtype=x.dtype) for weight in weights]


def _empty_product(x: Rows, gate: PackedWeight, *_: Any) -> Tensor:
    return _empty_products(x, [gate])[0]


ROWS, WEIGHT = Parts(_row_parts, _rows), Parts.of(PackedWeight)


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    floats, int8 = (c_void_p, c_int32), (c_void_p, c_void_p, c_int64, c_int32)
    sizes, weight = (c_int64,) * 3 + (c_int32,) * 2, (c_void_p, c_void_p)
    for name, rows in (("quant_matmul", floats), ("quant_matmul_int8", int8)):
        together, gated = getattr(library, name), getattr(library, f"{name}_swiglu")
        together.argtypes = rows + sizes + (*weight, c_void_p, c_int64) * MAX_TOGETHER
        gated.argtypes = (*rows, *sizes, *weight, *weight, c_void_p, c_int64)
        grouped = getattr(library, f"grouped_{name}")
        grouped.argtypes = (*(c_void_p,) * (1 if rows is floats else 2), c_int32, *sizes[1:], *(c_void_p,) * 4) + (
            c_int64,
        ) * 2
        together.restype = gated.restype = grouped.restype = None
    return library


def quant_matmul(x: Rows, weight: PackedWeight | Float8Weight | GPUWeight) -> Tensor:
    """x [M, K] (float32, bfloat16 or float16, or such rows quantised) times weight transposed: [M, N] in x's dtype.

    Of floats: a Float8Weight is rounded to x's dtype first. With the C++ kernels, 128 inputs of a row (or a group, if that is less) share a
    scale and have 16 bits: each is off by at most 2^-16 of the largest of them, and everything else is exact up to float32 sums. A row
    with NaN or infinity gives NaN or infinity.

    Of codes: int8 beside integers, whose sums of a group are exact, or float8_e4m3fn beside float8. Beside a float8 weight with groups the
    rows may have groups too, each of one or several whole ones of the weight's.
    """
    if isinstance(weight, Float8Weight):
        return float8.quant_matmul(x, weight)
    if isinstance(weight, GPUWeight):
        from kernels.quant_matmul import triton  # not at the top: a process without a GPU need not load it

        return triton.quant_matmul(x, weight)
    return quant_matmul_together(x, [weight], [None])[0]


@custom_op(_empty_products, parts={"x": ROWS, "weights": replace(WEIGHT, of_each=True)})
def quant_matmul_together(x: Rows, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """What `quant_matmul` gives for each weight, plus its bias [N]: [M, N] each, to the bit.

    Raises ValueError if shapes or dtypes do not belong together, for weights of several formats, and for more than MAX_TOGETHER.
    """
    library = build.library()
    if len(weights) > MAX_TOGETHER:
        raise ValueError(f"{len(weights)} weights: at most {MAX_TOGETHER} are multiplied together")
    _check(x, weights, biases)
    if library is None or not x.is_cpu:
        return [_portable(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    outs = [torch.empty(len(x), weight.num_outputs, dtype=x.dtype) for weight in weights]
    arguments: list[int | None] = []
    for weight, bias, out in zip(weights, biases, outs, strict=True):
        arguments += (weight.blob.data_ptr(), _address(bias), out.data_ptr(), weight.num_outputs)
    arguments += (None, None, None, 0) * (MAX_TOGETHER - len(weights))
    _call(library, "", x, weights[0], arguments)
    return outs


@custom_op(_empty_product, parts={"x": ROWS, "gate": WEIGHT, "up": WEIGHT})
def quant_matmul_swiglu(
    x: Rows,
    gate: PackedWeight,
    up: PackedWeight,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """silu(x gate^T + gate_bias) * (x up^T + up_bias): [M, N], to the bit what `swiglu` makes of the two products.

    Raises ValueError as `quant_matmul_together` does, and if gate and up have different numbers of outputs.
    """
    library = build.library()
    if gate.num_outputs != up.num_outputs:
        raise ValueError(f"a gate of {gate.num_outputs} outputs for {up.num_outputs}")
    _check(x, (gate, up), (gate_bias, up_bias))
    if library is None or not x.is_cpu:
        return swiglu(_portable(x, gate, gate_bias), _portable(x, up, up_bias))
    out = torch.empty(len(x), gate.num_outputs, dtype=x.dtype)
    weights = gate.blob.data_ptr(), _address(gate_bias), up.blob.data_ptr(), _address(up_bias)
    _call(library, "_swiglu", x, gate, [*weights, out.data_ptr(), gate.num_outputs])
    return out


def grouped_quant_matmul(x: Rows, weights: PackedWeights, starts: Tensor, ups: PackedWeights | None = None) -> Tensor:
    """x [M, K], whose rows starts[i] to starts[i + 1] - 1 are multiplied by weight number i, transposed: [M, N] in x's dtype.

    Int8 rows have a scale each. With `ups` the weights are gates, as of `quant_matmul_swiglu`. starts int64 [weights + 1], on the CPU, from
    0 to M. Bits are those of `quant_matmul_together` and `quant_matmul_swiglu`; a weight without rows is not read. Raises ValueError as
    they do.
    """
    library, first = build.library(), weights.first
    _check(x, [first] if ups is None else [first, ups.first], [None] if ups is None else [None, None])
    if (starts.shape, starts.dtype) != ((len(weights.weights) + 1,), torch.int64):
        raise ValueError(f"starts {list(starts.shape)} of {starts.dtype} for {len(weights.weights)} weights")
    if isinstance(x, QuantizedRows) and len(x.scales) != len(x):
        raise ValueError(f"{len(x.scales)} scale for {len(x)} rows: each has its own beside weights in groups")
    if ups is not None and (len(ups.weights), ups.first.num_outputs) != (len(weights.weights), first.num_outputs):
        gates, others = (f"{len(each.weights)} of {each.first.num_outputs} outputs" for each in (weights, ups))
        raise ValueError(f"gates {gates} beside {others}")
    if library is None or not x.is_cpu:
        return _grouped_portable(x, weights, starts.tolist(), ups)
    starts, out = starts.contiguous(), torch.empty(len(x), first.num_outputs, dtype=x.dtype)
    addresses = weights.addresses.data_ptr(), None if ups is None else ups.addresses.data_ptr(), starts.data_ptr()
    rest = first.num_inputs, *first.format, *addresses, out.data_ptr(), len(weights.weights), first.num_outputs
    if isinstance(x, QuantizedRows):
        codes, scales = x.codes.contiguous(), x.scales.contiguous()
        rows_at = codes.data_ptr(), scales.data_ptr(), build.DTYPES[x.dtype]
        _declared(library).grouped_quant_matmul_int8(*rows_at, *rest)
    else:
        x = x.contiguous()
        _declared(library).grouped_quant_matmul(x.data_ptr(), build.DTYPES[x.dtype], *rest)
    return out


def _grouped_portable(x: Rows, weights: PackedWeights, starts: list[int], ups: PackedWeights | None) -> Tensor:
    outs = []
    for i, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        part = (
            QuantizedRows(x.codes[start:end], x.scales[start:end], x.dtype)
            if isinstance(x, QuantizedRows)
            else x[start:end]
        )
        y = _portable(part, weights.weights[i], None)
        outs.append(y if ups is None else swiglu(y, _portable(part, ups.weights[i], None)))
    return torch.cat(outs)


def _portable(x: Rows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    y = portable.quant_matmul(x, weight)
    return y if bias is None else y + bias


def _call(library: ctypes.CDLL, ending: str, x: Rows, weight: PackedWeight, arguments: Sequence[int | None]) -> None:
    """The function of the library that has this ending, with the rows, the format of the weights, and what it wants of each."""
    sizes = weight.num_inputs, *weight.format, *arguments
    if isinstance(x, QuantizedRows):
        codes, scales = x.codes.contiguous(), x.scales.contiguous()
        rows = codes.data_ptr(), scales.data_ptr(), int(len(scales) > 1), build.DTYPES[x.dtype], len(codes)
        getattr(_declared(library), f"quant_matmul_int8{ending}")(*rows, *sizes)
    else:
        x = x.contiguous()
        getattr(_declared(library), f"quant_matmul{ending}")(x.data_ptr(), build.DTYPES[x.dtype], len(x), *sizes)


def _address(bias: Tensor | None) -> int | None:
    return None if bias is None else bias.data_ptr()


def _check(x: Rows, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> None:
    shape, format = x.shape, weights[0].format
    if x.dtype not in build.DTYPES:
        raise ValueError(f"products of {x.dtype}: there are only those of {', '.join(map(str, build.DTYPES))}")
    if isinstance(x, QuantizedRows) and x.codes.dtype != torch.int8:
        raise ValueError(f"rows of {x.codes.dtype}: weights of integers are multiplied by floats or int8")
    if isinstance(x, QuantizedRows) and tuple(x.scales.shape) not in ((1, 1), (shape[0], 1)):
        raise ValueError(f"scales {list(x.scales.shape)} for {shape[0]} rows: one of each, or [1, 1] of all")
    for weight, bias in zip(weights, biases, strict=True):
        if len(shape) != 2 or shape[1] != weight.num_inputs:
            raise ValueError(f"rows {list(shape)} cannot be multiplied by a weight of {weight.num_inputs} inputs")
        if weight.format != format:
            raise ValueError(f"weights of {format} and {weight.format} cannot be multiplied together")
        if bias is not None and (
            bias.shape != (weight.num_outputs,) or bias.dtype != x.dtype or not bias.is_contiguous()
        ):
            raise ValueError(
                f"a bias {list(bias.shape)} of {bias.dtype} for {weight.num_outputs} outputs of {x.dtype}, side by side"
            )
