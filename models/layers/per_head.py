"""Products of each head's inputs with the head's own weight.

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
    """Multiplies by a view of a parameter, which keeps the checkpoint's layout. On a CPU `merge` packs a copy."""

    def __init__(self, owner: Owner, weight: Callable[[Owner], Tensor]) -> None:
        """`weight` returns the view [H, N, K] of the owner's parameter.

        It takes the owner as an argument, so that a copied owner uses its own parameter.
        """
        super().__init__()
        self._owner = (owner,)  # in a tuple, so that the owner is not registered as a submodule
        self._view = weight
        self._packed: WeightGroup | None = None

    @property
    def _weight(self) -> Tensor:
        return self._view(self._owner[0])

    def merge(self) -> None:
        """Pack the weight after it is loaded. Packing it in every step took a tenth of DeepSeek-V2's step time."""
        weight = self._weight.detach()
        if weight.is_cpu and build.library() is not None:
            self._packed = WeightGroup([pack(each) for each in weight])

    def forward(self, x: Tensor) -> Tensor:
        """Return [M, H, N] of x [M, H, K]."""
        return linear_per_head(x, self._weight) if self._packed is None else matmul_per_head(x, self._packed)
