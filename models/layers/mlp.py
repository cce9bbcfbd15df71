"""Gated feed-forward layers: down(silu(gate(x)) * up(x)), x and the result [T, E] (arXiv 2002.05202).

T tokens, E hidden channels, F feed-forward channels.
"""

from torch import Tensor

from kernels.swiglu import swiglu
from models.layers.linear import Linear, linear_swiglu
from models.layers.named_parts import NamedParts


class MLP(NamedParts):
    names = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__(
            Linear(hidden_size, intermediate_size, bias),
            Linear(hidden_size, intermediate_size, bias),
            Linear(intermediate_size, hidden_size, bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self.parts
        return down(linear_swiglu(x, gate, up))  # type: ignore[no-any-return]


class FusedMLP(NamedParts):
    """One whose checkpoints hold gate and up as one matrix, one behind the other."""

    names = ("gate_up_proj", "down_proj")

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(
            Linear(hidden_size, 2 * intermediate_size, bias=False), Linear(intermediate_size, hidden_size, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        gate_up, down = self.parts
        gate, up = gate_up(x).chunk(2, dim=-1)  # [T, F] each
        return down(swiglu(gate, up))  # type: ignore[no-any-return]
