"""The layout of a float weight that is quantised while it is loaded."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from conf.errors import UserError
from quantization.layouts.base import OutputAxis, StoredWeight
from quantization.weight_format import WeightFormat, quantize


@dataclass(frozen=True)
class FloatLayout:
    """One tensor: weight [O, I], or [I, O] if it is transposed (Conv1D)."""

    shape: tuple[int, int]
    """[O, I]"""
    is_transposed: bool
    format: WeightFormat
    importance: Tensor | None = field(default=None, compare=False)
    """[I], for blocks: the mean square of each input channel."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self.shape[::-1] if self.is_transposed else self.shape}

    def output_axes(self) -> dict[str, OutputAxis]:
        return {} if self.format.depends_on_all_outputs else {"weight": OutputAxis(int(self.is_transposed))}

    def of_outputs(self, num_outputs: int) -> "FloatLayout":
        return replace(self, shape=(num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        weight = tensors["weight"]
        if not weight.is_floating_point():
            raise UserError(f"weight is {weight.dtype}, expected floats to quantise")
        return StoredWeight(quantize(weight.T if self.is_transposed else weight, self.format, self.importance))
