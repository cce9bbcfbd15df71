"""R rows, C channels, I channels of the result."""

from torch import Tensor


def take_channels(x: Tensor, order: Tensor) -> Tensor:
    """Return channels `order` of x [R, C]: [R, I], a bit-identical copy in x's dtype. order int64 [I], with values from
    0 to C - 1."""
    return x[:, order]
