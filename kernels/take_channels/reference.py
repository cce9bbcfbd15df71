"""R rows, C channels, I channels of the result."""

from torch import Tensor


def take_channels(x: Tensor, order: Tensor) -> Tensor:
    """Return the channels `order`, int64 [I], each from 0 to C - 1, of x [R, C]: [R, I] in x's dtype, copied to the bit."""
    return x[:, order]
