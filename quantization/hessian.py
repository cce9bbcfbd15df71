"""The Hessian of a linear layer's output error, and the factor of its inverse that GPTQ reads.

T tokens, I input channels, B channels of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import check
from kernels.accumulate_product import accumulate_product
from kernels.threads import threads
from quantization.activations import all_finite, check_activations

BLOCK_SIZE = 128  # channels per block; after a block the rest of a matrix is corrected in one product


@dataclass(frozen=True)
class InverseFactor:
    """The upper triangular U. U^T U is the inverse of the damped Hessian in `order`, up to a factor."""

    matrix: Tensor
    """U, [I, I] float32."""
    order: Tensor | None
    """The order in which input channels are rounded: the channel of each row, [I] int64. None is their own order."""
    damping: float
    """The damping that was needed."""


class Hessian:
    """Mean of x^T x over the inputs of linear layers that share them.

    It is the Hessian of a layer's squared output error, up to a factor.
    """

    def __init__(self, num_inputs: int, device: torch.device | str = "cpu") -> None:
        self._sum = torch.zeros(num_inputs, num_inputs, device=device)  # only its upper triangle
        self._num_tokens = 0
        self._factor: InverseFactor | None = None

    def add(self, x: Tensor) -> None:
        """Add activations x [T, I] of any float dtype. The split into calls changes the result only by rounding errors."""
        accumulate_product(self._sum, x, x, subtract=False, upper=True)
        self._num_tokens += x.shape[0]

    def mean(self) -> Tensor:
        """Return the mean [I, I] float32. Raises UserError as check_activations does."""
        check_activations(self._num_tokens, self._sum)
        mean = self._sum / self._num_tokens
        for start in range(0, len(mean), BLOCK_SIZE):  # mirrors the upper triangle without a copy of the whole
            rows = mean[start : start + BLOCK_SIZE]
            rows[:, :start] = mean[:start, start : start + BLOCK_SIZE].T
            block = rows[:, start : start + BLOCK_SIZE]
            block += block.triu(1).T
        return mean

    def inverse_factor(self, damping: float, act_order: bool) -> InverseFactor:
        """Return `inverse_factor` of the mean, computed once. Nothing can be added after the first call."""
        if self._factor is None:
            mean = self.mean()
            del self._sum  # as large as the factor
            self._factor = inverse_factor(mean, damping, act_order)
        return self._factor


def inverse_factor(hessian: Tensor, damping: float, act_order: bool) -> InverseFactor:
    """Return the factor of the inverse of hessian [I, I] float32, which is finite.

    damping: a share of the Hessian's mean diagonal, which is added to the diagonal. It grows tenfold until the Hessian
    can be inverted. act_order: the channels with the largest activations come first.

    The inverse itself is not computed. H = R R^T, with R upper triangular, is a Cholesky factorisation from the last
    row up, and U = R^-1.
    """
    check(damping > 0, "damping", damping, "a positive number")
    assert all_finite(hessian)  # Hessian.mean raises otherwise; no damping would help
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True) if act_order else None
    if not diagonal.any():
        return InverseFactor(torch.eye(len(hessian), device=hessian.device), order, damping)
    reverse = torch.arange(len(hessian) - 1, -1, -1, device=hessian.device) if order is None else order.flip(0)
    diagonal = diagonal[reverse] / diagonal.max()  # avoids overflow when damping is added
    while True:
        damped = hessian.index_select(0, reverse).index_select(1, reverse).div_(hessian.diagonal().max())
        damped.diagonal().copy_(diagonal + damping * diagonal.mean())
        with threads(None):  # the last bits of torch's factor of a block depend on the thread count
            inverse = _inverse_of_lower(damped) if _factorize(damped) else None
        if inverse is not None and all_finite(inverse):
            return InverseFactor(inverse.flip(0, 1), order, damping)
        damping *= 10


def _factorize(matrix: Tensor) -> bool:
    """Replace the upper triangle of a symmetric matrix [I, I] by its Cholesky factor L^T.

    Returns False if the matrix is not positive definite.
    """
    for start in range(0, len(matrix), BLOCK_SIZE):
        end = start + BLOCK_SIZE
        block = matrix[start:end, start:end].triu()
        lower, failed = torch.linalg.cholesky_ex(block + block.triu(1).T)
        if failed:
            return False
        matrix[start:end, start:end] = lower.T
        rest = matrix[start:end, end:]  # [B, I - end]
        rest.copy_(torch.linalg.solve_triangular(lower, rest, upper=False))
        accumulate_product(matrix[end:, end:], rest, rest, subtract=True, upper=True)
    return True


def _inverse_of_lower(factor: Tensor) -> Tensor:
    """Return L^-1 [I, I] from the upper triangle L^T of `factor`. The bits do not depend on the thread count."""
    inverse = torch.eye(len(factor), device=factor.device)
    for start in range(0, len(factor), BLOCK_SIZE):
        end = min(start + BLOCK_SIZE, len(factor))
        rows = inverse[start:end, :end]  # the identity, less the products with all blocks before
        rows.copy_(torch.linalg.solve_triangular(factor[start:end, start:end].T, rows, upper=False))
        accumulate_product(inverse[end:, :end], factor[start:end, end:], rows, subtract=True, upper=False)
    return inverse
