"""T tokens, F channels of the feed-forward layer."""

from torch import Tensor
from torch.nn.functional import silu


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202); gate, up and the result [T, F] in one float dtype."""
    return silu(gate) * up
