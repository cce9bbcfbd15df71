"""GPTQ (arXiv 2210.17323): round one input channel after the other, and correct the remaining channels for each error.

T tokens, O output channels, I input channels, G groups of input channels, B channels of a block.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conf.errors import check
from kernels.threads import threads
from quantization.activations import check_activations
from quantization.weight_format import QuantizedWeight, WeightFormat, choose_scales, encode

BLOCK_SIZE = 128  # channels per block; after a block the rest of the matrix is corrected in one product


class Hessian:
    """Mean of x^T x, [I, I] float32, over a linear layer's inputs.

    It is the Hessian of the layer's squared output error, up to a factor.
    """

    def __init__(self, num_inputs: int, device: torch.device | str = "cpu") -> None:
        self._sum = torch.zeros(num_inputs, num_inputs, device=device)
        self._num_tokens = 0

    def add(self, x: Tensor) -> None:
        """Add activations x [T, I] of any float dtype. The split into calls changes the result only by rounding errors."""
        wide = x.float()
        self._sum.addmm_(wide.T, wide)
        self._num_tokens += x.shape[0]

    def mean(self) -> Tensor:
        """Return the mean [I, I] float32. Raises UserError as check_activations does."""
        check_activations(self._num_tokens, self._sum)
        return self._sum / self._num_tokens


def gptq(
    weight: Tensor,
    hessian: Tensor,
    format: WeightFormat,
    damping: float = 0.01,
    act_order: bool = True,
    static_groups: bool = True,
    kept: Tensor | None = None,
) -> tuple[QuantizedWeight, float]:
    """Return codes of weight [O, I] that nearly keep the layer's output, and the damping that was needed.

    hessian: `Hessian.mean()`, [I, I] float32.
    damping: a share of the Hessian's mean diagonal, which is added to the diagonal. It grows tenfold until the Hessian
    can be inverted.
    act_order: round the channels with the largest activations first.
    static_groups: a group is a run of consecutive channels, and its scale is chosen before any rounding. Otherwise a
    group is a run in the rounding order, its scale is chosen when rounding reaches it, and `permutation` holds that
    order.
    kept: [O, I] bool, False for pruned weights; None keeps all. Pruned weights are 0 and stay 0, so that only the kept
    weights compensate for errors, as in SparseGPT (arXiv 2301.00774).
    A channel that is never active is rounded to nearest. Raises UserError as choose_scales does.
    """
    check(damping > 0, "damping", damping, "a positive number")
    scales, zero_points = choose_scales(weight, format)
    codes = encode(weight, scales, zero_points, format)  # initial codes; each column is overwritten when it is rounded
    result = QuantizedWeight(codes, scales, zero_points)
    order = torch.arange(weight.shape[1], device=weight.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    factor, damping = _inverse_factor(hessian, order, damping)
    remaining = weight.float().T[order]  # [I, O]: the weights of a channel are contiguous
    dynamic = format.group_size is not None and not static_groups
    mask = torch.ones_like(remaining, dtype=torch.bool) if kept is None else kept.T[order]  # [I, O]
    _round(remaining, mask, factor, format, result, range(len(order)) if dynamic else order.tolist(), dynamic)
    if not (dynamic and act_order):
        return result, damping
    # Within a group, channels keep their original order, because a file stores only the group of each channel.
    order, within = order.unflatten(0, (result.scales.shape[1], -1)).sort(1)  # [G, I / G]
    codes = codes.unflatten(1, within.shape).gather(2, within.expand(len(codes), -1, -1))  # [O, G, I / G]
    return replace(result, codes=codes.flatten(1), permutation=order.flatten()), damping


def _round(
    remaining: Tensor,
    mask: Tensor,
    factor: Tensor,
    format: WeightFormat,
    result: QuantizedWeight,
    columns: Sequence[int],
    dynamic: bool,
) -> None:
    """Write the codes of remaining [I, O] into `result`: channel i at columns[i], with the scale of that column's group.

    Overwrites `remaining`. mask: [I, O] bool, False for pruned weights, which get the code of 0. factor: from
    _inverse_factor. dynamic: choose and write the scale of a group when its first channel is reached.
    """
    num_inputs, size = remaining.shape[0], format.group_size or remaining.shape[0]
    # Corrections reach later channels only within a block until the block ends. A group whose scale is chosen here must
    # therefore fit in one block.
    step = size * max(1, BLOCK_SIZE // size) if dynamic else BLOCK_SIZE
    for start in range(0, num_inputs, step):
        end = min(start + step, num_inputs)
        errors = torch.empty_like(remaining[start:end])  # [B, O]
        with threads(None):  # the last bits of torch's addr_ depend on the thread count
            for i in range(start, end):
                group = slice(columns[i] // size, columns[i] // size + 1)
                if dynamic and i % size == 0:
                    _choose_group(remaining[i : i + size].where(mask[i : i + size], 0).T, format, result, group)
                scales = result.scales[:, group]  # [O, 1]
                zero_points = None if result.zero_points is None else result.zero_points[:, group]
                codes = encode(remaining[i].where(mask[i], 0).unsqueeze(1), scales, zero_points, format)  # [O, 1]
                result.codes[:, columns[i]] = codes.squeeze(1)
                rounded = QuantizedWeight(codes, scales, zero_points).dequantize().squeeze(1)  # [O]
                errors[i - start] = (remaining[i] - rounded) / factor[i, i]
                remaining[i + 1 : end].addr_(factor[i, i + 1 : end], errors[i - start], alpha=-1)
        remaining[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)


def _choose_group(weight: Tensor, format: WeightFormat, result: QuantizedWeight, group: slice) -> None:
    scales, zero_points = choose_scales(weight, format)
    result.scales[:, group] = scales
    if result.zero_points is not None and zero_points is not None:
        result.zero_points[:, group] = zero_points


def _inverse_factor(hessian: Tensor, order: Tensor, damping: float) -> tuple[Tensor, float]:
    """Return the upper triangular U [I, I] and the damping.

    U^T U is, up to a factor, the inverse of the damped Hessian in `order`.

    The inverse itself is not computed. H = R R^T, with R upper triangular, is a Cholesky factorisation from the last
    row up, and U = R^-1.
    """
    assert hessian.isfinite().all()  # Hessian.mean raises otherwise; no damping would help
    reverse = order.flip(0)
    damped = hessian[reverse][:, reverse]
    diagonal = damped.diagonal().clone()
    if not diagonal.any():
        return torch.eye(len(order), device=hessian.device), damping
    damped /= diagonal.max()  # avoids overflow when damping is added
    diagonal /= diagonal.max()
    while True:
        damped.diagonal().copy_(diagonal + damping * diagonal.mean())
        with threads(None):  # the last bits of the factor depend on the thread count
            lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            identity = torch.eye(len(order), device=hessian.device)
            inverse = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
            if inverse.isfinite().all():
                return inverse, damping
        damping *= 10
