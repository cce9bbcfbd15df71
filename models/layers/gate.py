"""The sigmoid of gates."""

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Return sigmoid(x) in x's dtype, computed in float32.

    torch's sigmoid is not used: on a CPU it computes the last of many numbers in another way. exp does not.
    """
    return (1 / (1 + (-x.float()).exp())).to(x.dtype)
