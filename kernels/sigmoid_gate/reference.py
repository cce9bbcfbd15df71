"""T tokens, C channels."""

from torch import Tensor


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), as in gated attention (arXiv 2505.06708) and for a shared expert.

    x [T, C], gate [T, C] or [T, 1] and the result [T, C] have one float dtype; the sigmoid is computed in float32 and
    rounded before the product.

    torch's sigmoid is not used: on a CPU it computes the last elements of a tensor with different arithmetic.
    """
    return x * (1 / (1 + (-gate.float()).exp())).to(x.dtype)
