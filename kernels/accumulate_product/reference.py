"""K rows, M and N channels."""

from torch import Tensor


def accumulate_product(out: Tensor, a: Tensor, b: Tensor, subtract: bool, upper: bool) -> None:
    """Add a^T b to `out`, or subtract it.

    out: [M, N] float32. a: [K, M] and b: [K, N] of one float dtype. upper: leave the elements below the diagonal as they
    are.
    """
    product = a.float().T @ b.float()
    out.add_(product.triu() if upper else product, alpha=-1 if subtract else 1)
