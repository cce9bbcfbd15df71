"""The functions that a graph may call, and the sources of the indices that C++ kernels trust."""

import operator
from collections.abc import Callable
from typing import Any

import torch

from kernels.collectives import nodes
from kernels.gated_rms_norm import gated_rms_norm
from kernels.gelu import gelu, gelu_tanh
from kernels.layer_norm import layer_norm, layer_norm_quantize
from kernels.linear import (
    grouped_matmul,
    linear,
    linear_per_head,
    matmul_per_head,
    matmul_swiglu,
    matmul_together,
    take_rows,
)
from kernels.lora import lora_add
from kernels.moe import combine_rows, group_rows, route, route_corrected
from kernels.quantize_rows import quantize_rows
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantize, rms_norm, rms_norm_quantize
from kernels.rope import rope, rope_angles
from kernels.sigmoid_gate import sigmoid_gate
from kernels.soft_cap import soft_cap
from kernels.swiglu import swiglu, swiglu_quantize
from kernels.take_channels import take_channels
from models.exported.cache_functions import CACHE_INDEX_PRODUCERS, CACHE_OPERATORS

OPERATORS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        add_rms_norm,
        add_rms_norm_quantize,
        combine_rows,
        gated_rms_norm,
        gelu,
        gelu_tanh,
        group_rows,
        grouped_matmul,
        layer_norm,
        layer_norm_quantize,
        linear,
        linear_per_head,
        lora_add,
        matmul_per_head,
        matmul_swiglu,
        matmul_together,
        quantize_rows,
        rms_norm,
        rms_norm_quantize,
        rope,
        rope_angles,
        route,
        route_corrected,
        sigmoid_gate,
        soft_cap,
        swiglu,
        swiglu_quantize,
        take_channels,
        take_rows,
    )
} | CACHE_OPERATORS
"""Quintet's operators, by the names of their nodes."""
ATEN = frozenset(
    """
    abs.default add.Tensor amax.default amin.default arange.default arange.start bitwise_not.default bucketize.Tensor
    cat.default chunk.default clamp.default clone.default contiguous.default cos.default div.Tensor embedding.default
    exp.default expand.default flatten.using_ints floor_divide.default gather.default gt.Scalar index.Tensor log.default
    lt.Scalar lt.Tensor masked_fill.Scalar maximum.default mul.Tensor narrow.default neg.default new_full.default
    new_zeros.default permute.default reciprocal.default relu.default reshape.default scatter.value select.int
    sigmoid.default sin.default slice.Tensor softmax.int split_with_sizes.default squeeze.dim stack.default sub.Tensor
    sum.dim_IntList sym_size.int tanh.default to.dtype topk.default transpose.int unbind.int unflatten.int
    unsqueeze.default view.default where.self zeros_like.default
    """.split()
)
"""torch's operators, with their overloads."""
SIZES: dict[str, Callable[..., Any]] = {
    "_operator.add": operator.add,
    "_operator.sub": operator.sub,
    "_operator.mul": operator.mul,
    "_operator.floordiv": operator.floordiv,
}
"""Integer operations on sizes."""
ONLY_CHECKS = "torch.ops.aten._assert_tensor_metadata.default"
"""This node is skipped: it repeats facts that every trace contains."""
INDEX_PRODUCERS = {
    **CACHE_INDEX_PRODUCERS,
    ("group_rows", "chosen"): {"route.1", "route_corrected.1", "topk.1"},
    ("grouped_matmul", "starts"): {"group_rows.1"},
    ("combine_rows", "places"): {"group_rows.2"},
    ("lora_add", "slots"): {"adapter_slots", "adapter_slots[output_rows].0"},
    ("lora_add", "y"): {"linear.0", *(f"matmul_together.{number}" for number in range(3))},
}
"""The allowed producers of unchecked arguments, by operator and argument.

C++ uses these arguments as memory indices, or writes into them. A producer is a field of the batch, the output rows of
a field, a recurrent state of the cache, or an output of an operator.
"""


def function_of(target: str) -> Callable[..., Any] | None:
    """Return the function of a node. None: the node is not allowed."""
    library, _, name = target.removeprefix("torch.ops.").partition(".")
    if library == "quintet":
        return OPERATORS.get(name.removesuffix(".default"))
    if library == "aten" and name in ATEN:
        packet, _, overload = name.partition(".")
        function: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload)
        return function
    return SIZES.get(target)


def schemas() -> dict[str, str]:
    """Return the torch schema of each operator, by name."""
    return {name: str(getattr(torch.ops.quintet, name).default._schema) for name in (*OPERATORS, *nodes.NAMES)}
