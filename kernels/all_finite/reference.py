"""R rows of C numbers."""

from torch import Tensor


def all_finite(x: Tensor) -> Tensor:
    """Return whether no number of a row is NaN or infinite: bool [R], from x [R, C] of any floating dtype."""
    return x.isfinite().all(-1)
