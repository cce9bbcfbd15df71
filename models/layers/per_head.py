"""Products of each head's inputs with a weight of its own.

M rows, H heads, K inputs and N outputs of a head.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from kernels import build
from kernels.linear import WeightGroup, linear_per_head, matmul_per_head, pack
from models.layers.module import Module

Owner = TypeVar("Owner", bound=Module)


class PerHead(Module, Generic[Owner]):
    """The product with a view of a parameter, which stays as the checkpoint has it. On a CPU `merge` packs a copy."""

    def __init__(self, owner: Owner, weight: Callable[[Owner], Tensor]) -> None:
        """`weight` returns the view [H, N, K] of what the owner has loaded: a copy of the owner is the owner of the product's copy."""
        super().__init__()
        self._owner = (owner,)  # in a tuple, so that it is no module of this one
        self._view = weight
        self._packed: WeightGroup | None = None

    @property
    def _weight(self) -> Tensor:
        return self._view(self._owner[0])

    def merge(self) -> None:
        """Prepare the product, once the weight is loaded: packed in every step it took a tenth of DeepSeek-V2's."""
        weight = self._weight.detach()
        if weight.is_cpu and build.library() is not None:
            self._packed = WeightGroup([pack(each) for each in weight])

    def forward(self, x: Tensor) -> Tensor:
        """Return [M, H, N] of x [M, H, K]."""
        return linear_per_head(x, self._weight) if self._packed is None else matmul_per_head(x, self._packed)
