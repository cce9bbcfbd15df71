"""T tokens, F channels of the feed-forward layer."""

from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202); gate, up and the result [T, F] in one float dtype; silu is float32, rounded once.

    Not torch's silu: on a CPU its arithmetic for the last elements of a tensor, and of each thread's share, is another one, so that a
    row's bits would depend on how many rows there are. exp has no such seam.
    """
    wide = gate.float()
    return (wide / (1 + (-wide).exp())).to(gate.dtype) * up
