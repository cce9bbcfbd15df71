"""Numbers of any shape."""

from torch import Tensor


def all_finite(x: Tensor) -> Tensor:
    """Whether no number of x is NaN or infinite: bool []."""
    return x.isfinite().all()
