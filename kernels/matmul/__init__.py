"""Matrix product with a weight of float32, bfloat16 or float16.

M rows, K inputs, N outputs, H heads. With the C++ kernels a row's result does not depend on the other rows or on the number of threads, to
the bit. Without them torch multiplies, and the order of its sums may depend on the number of rows.
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
from kernels.matmul import reference
from kernels.matmul.packed import INPUTS_OF_STEP, PackedMatrices, PackedMatrix, pack
from kernels.swiglu import swiglu

__all__ = [
    "MAX_TOGETHER",
    "PackedMatrices",
    "PackedMatrix",
    "grouped_matmul",
    "linear",
    "linear_per_head",
    "matmul",
    "matmul_swiglu",
    "matmul_together",
    "pack",
]

WEIGHT = Parts.of(PackedMatrix)
MAX_TOGETHER = 3  # weights that one call multiplies: queries, keys and values


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    rows, weight = (c_void_p, c_int32, c_int64, c_int64), (c_void_p, c_int32, c_void_p)
    library.matmul.argtypes = rows + (*weight, c_void_p, c_int64) * MAX_TOGETHER
    library.matmul_swiglu.argtypes = (*rows, *weight, *weight, c_void_p, c_int64)
    library.grouped_matmul.argtypes = (c_void_p, c_int32, c_int64, *(c_void_p,) * 6, c_int64, c_int64)
    library.linear.argtypes = (
        c_void_p,
        c_int32,
        *(c_int64,) * 3,
        c_void_p,
        *(c_int64,) * 3,
        c_void_p,
        c_void_p,
        c_int64,
    )
    for function in (library.matmul, library.matmul_swiglu, library.grouped_matmul, library.linear):
        function.restype = None
    return library


def _empty_products(x: Tensor, weights: Sequence[PackedMatrix], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape[0], weight.num_outputs) for weight in weights]


def _empty_product(x: Tensor, gate: PackedMatrix, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], gate.num_outputs)


def _empty_linear(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[-2])


@custom_op(_empty_linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N].

    It is for a weight that is used once, or in other ways too: the weight stays as it is, and every call packs it part by part. With the
    C++ kernels the bits are those of `matmul` with the packed weight.
    """
    if x.ndim != 2 or not _is_ours(x, weight, bias):
        return reference.linear(x, weight, bias)
    return _linear(x[None], weight[None], bias)[0]


@custom_op(_empty_linear)
def linear_per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Every head's x [M, H, K] times its own weight [H, N, K] transposed: [M, H, N], each as by `linear`."""
    if x.ndim != 3 or not _is_ours(x, weight, None):
        return reference.linear_per_head(x, weight)
    return _linear(x.transpose(0, 1), weight, None).transpose(0, 1)


def _is_ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the C++ kernels multiply them. What does not belong together is left to torch, which refuses it."""
    are_cpu = x.is_cpu and weight.is_cpu and (bias is None or bias.is_cpu)
    if not are_cpu or x.dtype not in INPUTS_OF_STEP or build.library() is None:
        return False
    heads = x.shape[1:-1]  # [H], or []
    return (
        weight.shape == (*heads, weight.shape[-2], x.shape[-1])
        and weight.dtype == x.dtype
        and (bias is None or (bias.shape, bias.dtype) == (weight.shape[:1], x.dtype))
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [H, M, K] and weight [H, N, K]: [H, M, N]."""
    library = build.library()
    assert library is not None
    if 1 not in weight.stride()[1:]:
        weight = weight.contiguous()
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out = torch.empty(*x.shape[:2], weight.shape[1], dtype=x.dtype)
    _declared(library).linear(
        *(x.data_ptr(), build.DTYPES[x.dtype], *x.shape, weight.data_ptr(), *weight.stride()),
        *(_address(bias), out.data_ptr(), weight.shape[1]),
    )
    return out


def matmul(x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times weight transposed, plus bias [N]: [M, N]. All have the weight's dtype; sums are float32, rounded once.

    Raises ValueError if shapes or dtypes do not belong together.
    """
    return matmul_together(x, [weight], [bias])[0]


@custom_op(_empty_products, parts={"weights": replace(WEIGHT, of_each=True)})
def matmul_together(x: Tensor, weights: Sequence[PackedMatrix], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """What `matmul` gives for each weight and its bias, to the bit. Raises ValueError as it does, and for over MAX_TOGETHER weights."""
    library = build.library()
    if len(weights) > MAX_TOGETHER:
        raise ValueError(f"{len(weights)} weights: at most {MAX_TOGETHER} are multiplied together")
    for weight, bias in zip(weights, biases, strict=True):
        _check(x, weight, bias)
    if library is None:
        return [reference.linear(x, weight.unpack(), bias) for weight, bias in zip(weights, biases, strict=True)]
    x, num_rows = x.contiguous(), x.shape[0]
    outs = [torch.empty(num_rows, weight.num_outputs, dtype=x.dtype) for weight in weights]
    arguments: list[int | None] = []
    for weight, bias, out in zip(weights, biases, outs, strict=True):
        arguments += (*_read_as(weight), _address(bias), out.data_ptr(), weight.num_outputs)
    arguments += (None, 0, None, None, 0) * (MAX_TOGETHER - len(weights))
    _declared(library).matmul(x.data_ptr(), build.DTYPES[x.dtype], num_rows, x.shape[1], *arguments)
    return outs


@custom_op(_empty_product, parts={"gate": WEIGHT, "up": WEIGHT})
def matmul_swiglu(
    x: Tensor, gate: PackedMatrix, up: PackedMatrix, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Tensor:
    """silu(x gate^T + gate_bias) * (x up^T + up_bias): [M, N], to the bit what `swiglu` makes of the two products.

    Raises ValueError as `matmul` does, and if gate and up have different numbers of outputs.
    """
    library = build.library()
    if gate.num_outputs != up.num_outputs:
        raise ValueError(f"a gate of {gate.num_outputs} outputs for {up.num_outputs}")
    if library is None:
        return swiglu(matmul(x, gate, gate_bias), matmul(x, up, up_bias))
    _check(x, gate, gate_bias)
    _check(x, up, up_bias)
    x = x.contiguous()
    out = torch.empty(x.shape[0], gate.num_outputs, dtype=x.dtype)
    _declared(library).matmul_swiglu(
        *(x.data_ptr(), build.DTYPES[x.dtype], *x.shape),
        *(*_read_as(gate), _address(gate_bias), *_read_as(up), _address(up_bias)),
        *(out.data_ptr(), gate.num_outputs),
    )
    return out


def grouped_matmul(x: Tensor, weights: PackedMatrices, starts: Tensor, ups: PackedMatrices | None = None) -> Tensor:
    """x [M, K], whose rows starts[i] to starts[i + 1] - 1 are multiplied by weight number i, transposed: [M, N].

    With `ups` the weights are gates, as of `matmul_swiglu`. starts int64 [weights + 1], on the CPU, from 0 to M. Bits are those of
    `matmul` and `matmul_swiglu`; a weight without rows is not read. Raises ValueError as they do.
    """
    library, first = build.library(), weights.first
    _check(x, first, None)
    if (starts.shape, starts.dtype) != ((len(weights.matrices) + 1,), torch.int64):
        raise ValueError(f"starts {list(starts.shape)} of {starts.dtype} for {len(weights.matrices)} weights")
    if ups is not None:
        _check(x, ups.first, None)
        if (len(ups.matrices), ups.first.num_outputs) != (len(weights.matrices), first.num_outputs):
            gates, others = (f"{len(each.matrices)} of {each.first.num_outputs} outputs" for each in (weights, ups))
            raise ValueError(f"gates {gates} beside {others}")
    if library is None:
        parts = x.split(starts.diff().tolist())
        if ups is None:
            return torch.cat([matmul(*pair) for pair in zip(parts, weights.matrices, strict=True)])
        return torch.cat([matmul_swiglu(*all) for all in zip(parts, weights.matrices, ups.matrices, strict=True)])
    x, starts, out = x.contiguous(), starts.contiguous(), torch.empty(x.shape[0], first.num_outputs, dtype=x.dtype)
    _declared(library).grouped_matmul(
        *(x.data_ptr(), build.DTYPES[x.dtype], first.num_inputs),
        *(weights.addresses.data_ptr(), weights.are_compressed.data_ptr()),
        *((None, None) if ups is None else (ups.addresses.data_ptr(), ups.are_compressed.data_ptr())),
        *(starts.data_ptr(), out.data_ptr(), len(weights.matrices), first.num_outputs),
    )
    return out


def _read_as(weight: PackedMatrix) -> tuple[int, int]:
    """Its address, and whether it is compressed."""
    return weight.tiles.data_ptr(), int(weight.is_compressed)


def _address(bias: Tensor | None) -> int | None:
    return None if bias is None else bias.data_ptr()


def _check(x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> None:
    if x.ndim != 2 or x.shape[1] != weight.num_inputs or x.dtype != weight.dtype:
        raise ValueError(
            f"rows {list(x.shape)} of {x.dtype} and a weight of {weight.num_inputs} inputs of {weight.dtype}"
        )
    if x.device != weight.tiles.device:
        raise ValueError(f"rows on {x.device} and a weight on {weight.tiles.device}")
    if bias is not None and (bias.shape != (weight.num_outputs,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(
            f"a bias {list(bias.shape)} of {bias.dtype} for {weight.num_outputs} outputs of {x.dtype}, side by side"
        )
