"""Mixture of experts: routing, grouping rows by expert, and the weighted sum; on a GPU also the experts' products."""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.linear.gpu_weight import GPUWeight
from kernels.moe import reference
from kernels.operator import UnsupportedArguments, operator
from kernels.quantize_rows import ActivationFormat

__all__ = ["combine_rows", "group_rows", "mixture", "route", "route_corrected"]


def _check_choice(logits: Tensor, num_chosen: int, renormalise: bool) -> None:
    if not 1 <= num_chosen <= logits.shape[1]:
        raise ValueError(f"{num_chosen} of {logits.shape[1]} experts cannot be chosen: at least 1, at most all")


@operator(reference.route, check=_check_choice, has_triton=True)
def route(cpp: Library, logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Select each token's experts, as `reference.route` does. Raises ValueError unless 1 <= K <= N."""
    dtype = DTYPES.get(logits.dtype)
    if dtype is None or not logits.is_cpu:
        raise UnsupportedArguments
    logits = logits.contiguous()
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_chosen)
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int64)
    cpp.route(
        logits.data_ptr(),
        dtype,
        weights.data_ptr(),
        chosen.data_ptr(),
        num_tokens,
        num_chosen,
        num_experts,
        renormalise,
    )
    return weights, chosen


def _check_corrected(
    logits: Tensor,
    correction: Tensor,
    num_chosen: int,
    renormalise: bool,
    is_softmax: bool = False,
    num_groups: int = 1,
    num_kept: int = 1,
    num_scored: int = 2,
) -> None:
    experts = logits.shape[-1]
    if logits.ndim != 2 or correction.shape != (experts,) or not logits.dtype == correction.dtype == torch.float32:
        shapes = " and ".join(f"{list(tensor.shape)} of {tensor.dtype}" for tensor in (logits, correction))
        raise ValueError(f"{shapes} are not logits [T, N] and corrections [N] of float32")
    if (
        not 1 <= num_kept <= num_groups
        or experts % num_groups
        or (num_kept < num_groups and experts < num_scored * num_groups)
    ):
        raise ValueError(f"{num_kept} of {num_groups} groups of {experts} experts cannot be kept")
    if num_scored not in (1, 2):
        raise ValueError(f"a group cannot be scored by its {num_scored} best experts: by 1 or 2")
    num_candidates = num_kept * experts // num_groups
    if not 1 <= num_chosen <= num_candidates:
        raise ValueError(f"{num_chosen} of {num_candidates} experts cannot be chosen: at least 1, at most all")


def _empty_choice(logits: Tensor, correction: Tensor, num_chosen: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], num_chosen
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


@operator(reference.route_corrected, fake=_empty_choice, check=_check_corrected)
def route_corrected(
    cpp: Library,
    logits: Tensor,
    correction: Tensor,
    num_chosen: int,
    renormalise: bool,
    is_softmax: bool = False,
    num_groups: int = 1,
    num_kept: int = 1,
    num_scored: int = 2,
) -> tuple[Tensor, Tensor]:
    """Select each token's experts, as `reference.route_corrected` does. If scores are equal, the lower expert
    number is first.

    Raises ValueError for other shapes and dtypes, and for more experts or groups than exist.
    """
    if not (logits.is_cpu and correction.is_cpu):
        raise UnsupportedArguments
    logits, correction = logits.contiguous(), correction.contiguous()
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_chosen)
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int64)
    cpp.route_corrected(
        logits.data_ptr(),
        correction.data_ptr(),
        weights.data_ptr(),
        chosen.data_ptr(),
        num_tokens,
        num_chosen,
        num_experts,
        renormalise,
        is_softmax,
        num_groups,
        num_kept,
        num_scored,
    )
    return weights, chosen


def _empty_groups(x: Tensor, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty(chosen.shape[0] * chosen.shape[1], x.shape[1])
    return rows, chosen.new_empty(num_experts + 1), torch.empty_like(chosen)


@operator(reference.group_rows, fake=_empty_groups)
def group_rows(cpp: Library, x: Tensor, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy every token's row once for each of its experts, ordered by expert, as `reference.group_rows` does."""
    if not x.is_cpu or (x.ndim, chosen.ndim, chosen.dtype) != (2, 2, torch.int64) or len(chosen) != len(x):
        raise UnsupportedArguments
    x, chosen = x.contiguous(), chosen.contiguous()
    num_tokens, num_chosen = chosen.shape
    rows = torch.empty(num_tokens * num_chosen, x.shape[1], dtype=x.dtype)
    starts, places = torch.empty(num_experts + 1, dtype=torch.int64), torch.empty_like(chosen)
    cpp.group_rows(
        x.data_ptr(),
        chosen.data_ptr(),
        rows.data_ptr(),
        places.data_ptr(),
        starts.data_ptr(),
        num_tokens,
        num_chosen,
        num_experts,
        x.shape[1] * x.itemsize,
    )
    return rows, starts, places


def _empty_sums(parts: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    return parts.new_empty(places.shape[0], parts.shape[1])


@operator(reference.combine_rows, fake=_empty_sums)
def combine_rows(cpp: Library, parts: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Return each token's weighted sum [T, E] of its experts' results, as `reference.combine_rows` does."""
    dtype = DTYPES.get(parts.dtype)
    are_known = (weights.dtype, places.dtype) == (torch.float32, torch.int64) and weights.shape == places.shape
    are_known = are_known and parts.ndim == places.ndim == 2
    if dtype is None or not parts.is_cpu or not are_known:
        raise UnsupportedArguments
    parts, weights, places = parts.contiguous(), weights.contiguous(), places.contiguous()
    out = torch.empty(len(places), parts.shape[1], dtype=parts.dtype)
    cpp.combine_rows(
        parts.data_ptr(), dtype, weights.data_ptr(), places.data_ptr(), out.data_ptr(), *places.shape, parts.shape[1]
    )
    return out


def mixture(
    x: Tensor,
    gate_up: GPUWeight,
    down: GPUWeight,
    weights: Tensor,
    chosen: Tensor,
    gate_up_rows: ActivationFormat | None = None,
    down_rows: ActivationFormat | None = None,
) -> Tensor:
    """Compute the same as `reference.mixture` for unquantised or quantised weights. For GPUs only, without
    synchronisation."""
    from kernels.moe import triton

    return triton.mixture(x, gate_up, down, weights, chosen, gate_up_rows, down_rows)
