"""Products of each head's inputs with the head's own weight.

M rows, H heads, K inputs and N outputs of a head.
"""

from collections.abc import Callable

from torch import Tensor

from kernels import build
from kernels.linear import WeightGroup, linear_per_head, matmul_per_head, pack


class PerHead:
    """Multiplies by a view [H, N, K] of a parameter, which keeps the checkpoint's layout. On a CPU `pack` packs a copy."""

    def __init__(self) -> None:
        self._packed: WeightGroup | None = None

    def pack(self, weight: Tensor) -> None:
        """Pack the loaded weight. Packing it in every step took a tenth of DeepSeek-V2's step time."""
        if weight.is_cpu and build.library() is not None:
            self._packed = WeightGroup([pack(head_weight) for head_weight in weight.detach()])

    def __call__(self, x: Tensor, weight: Callable[[], Tensor]) -> Tensor:
        """Return [M, H, N] of x [M, H, K]. `weight` makes the view, which a packed weight does not need."""
        return linear_per_head(x, weight()) if self._packed is None else matmul_per_head(x, self._packed)
