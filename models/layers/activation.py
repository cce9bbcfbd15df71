"""The sigmoid, of which every element is computed the same way wherever it stands in a tensor.

torch's computes the last elements of a tensor, and of a thread's part of it, in another arithmetic than the others (see kernels/swiglu), so
that a row's bits would depend on the rows beside it. exp has no such seam.
"""

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) in x's dtype."""
    return 1 / (1 + (-x).exp())
