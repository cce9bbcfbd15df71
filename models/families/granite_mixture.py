"""Granite's mixtures of experts.

T tokens, E hidden channels, N experts.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.moe import route
from models.batch import Batch
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.moe import Experts
from models.layers.named_parts import NamedParts
from models.layout import JoinedExperts

JOINED = JoinedExperts("input_linear.weight", "output_linear.weight", inputs_first=False)


class Router(NamedParts):
    names = ("layer",)


class GraniteMixture(Module):
    """A router and its experts. The weights of a token's experts are normalised to a sum of 1."""

    readers: Sequence[Linear] = ()
    """Empty, because router and experts read floats."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, num_experts_per_tok: int) -> None:
        super().__init__()
        self.router = Router(Linear(hidden_size, num_experts, bias=False, is_quantizable=False))
        experts = (MLP(hidden_size, intermediate_size) for _ in range(num_experts))
        self.experts = Experts(experts, num_experts_per_tok)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        """x and the result are [T, E]."""
        logits = self.router.parts[0](x, batch)  # [T, N]
        result: Tensor = self.experts(x, *route(logits, self.experts.num_experts_per_tok, True))
        return result
