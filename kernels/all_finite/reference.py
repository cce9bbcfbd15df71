"""R rows of C numbers."""

from torch import Tensor


def all_finite(x: Tensor) -> Tensor:
    """Return whether each row of x [R, C], of any floating dtype, contains neither NaN nor infinity: bool [R]."""
    return x.isfinite().all(-1)
