"""The linear layer, whose every row is computed the same way however many rows there are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.matmul.reference import MIN_ROWS, linear
from kernels.quant_matmul.gpu_weight import GPUWeight, RowCodes, of_floats
from kernels.swiglu import swiglu

__all__ = ["Linear", "linear", "linear_per_head", "linear_swiglu", "linear_together"]


def linear_per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Every head's x [R, H, I] times its own weight [H, O, I] transposed: [R, H, O]. Rows as above."""
    num_rows, least = x.shape[0], MIN_ROWS.get(x.dtype, 1)
    if num_rows < least and x.device.type == "cpu":
        x = functional.pad(x, (0, 0, 0, 0, 0, least - num_rows))
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)[:num_rows]


class ExpertLinear(nn.Module, ABC):
    """A layer that may be one of several experts', whose weights the kernels of a GPU read as one."""

    @property
    @abstractmethod
    def expert_kind(self) -> Hashable:
        """Layers of an equal one are computed together; None: each alone."""

    @property
    @abstractmethod
    def gpu_weight(self) -> GPUWeight:
        """Of a layer with an `expert_kind`."""

    @abstractmethod
    def keep(self, weight: GPUWeight) -> None:
        """Take this copy of `gpu_weight` for its own, a piece of all experts' weight."""

    @property
    def row_scale(self) -> Tensor | None:
        """float32 [], with which rows are quantised before the product, if it was chosen before."""
        return None

    @abstractmethod
    def row_codes(self, num_rows: int, num_layers: int, row_scales: Tensor | None = None) -> RowCodes | None:
        """What rows become before the product, where so many layers, of these `row_scales`, divide so many rows among them."""


class Linear(nn.Linear, ExpertLinear):
    output_axis = 0  # of the weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    @property
    def expert_kind(self) -> Hashable:
        return self.gpu_weight.format if self.bias is None and self.weight.is_cuda else None

    @property
    def gpu_weight(self) -> GPUWeight:
        return of_floats(self.weight.detach())

    def keep(self, weight: GPUWeight) -> None:
        self.weight = nn.Parameter(weight.codes, requires_grad=False)

    def row_codes(self, num_rows: int, num_layers: int, row_scales: Tensor | None = None) -> RowCodes | None:
        return None


class Conv1D(nn.Module):
    """A linear layer whose weight is stored [in, out], as the original code's convolutions of width 1 were."""

    output_axis = 1

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.T, self.bias)


class FloatLinear(Linear):
    """One that a quantised model keeps in floats: a router, whose few weights decide much."""


class PlainLinear(FloatLinear):
    """One whose weight is used in other ways than by its product, so that it is held in no other form at all."""


class TiedHead(nn.Module):
    """An embedding [V, E] that is the head too. It has no parameters of its own."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, or its weight would have a second name

    @property
    def weight(self) -> Tensor:
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def make_head(embedding: nn.Embedding, tied: bool) -> nn.Module:
    """From hidden states [R, E] to logits [R, V]: the embedding again, or a weight of its own."""
    vocab_size, channels = embedding.weight.shape
    return TiedHead(embedding) if tied else Linear(channels, vocab_size, bias=False)


@dataclass(frozen=True)
class Layer:
    """A linear layer whose weight may be held in another form."""

    name: str
    source: str
    """The name of its weight in a float checkpoint, without `.weight`: of a tied head the embedding's."""
    shape: tuple[int, int]
    """[O, I]"""
    is_transposed: bool
    """Whether a float checkpoint holds it as [I, O]."""
    has_bias: bool


class PackedLinear(nn.Module, ABC):
    """What stands in the place of a `Linear`, `Conv1D` or `TiedHead` whose weight is held in another form: a machine's, or fewer bits.

    Its parameters are made when all of its tensors have come from the checkpoint, so that no more than one layer is there in floats.
    """

    source: str
    """The name that its tensors have in the checkpoint, before their own: its own, or of a tied head the embedding's."""

    from_floats: bool
    """Whether they are floats of 16 or 32 bits, as of a layer that is not packed."""

    @abstractmethod
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Own names and shapes of the tensors that it is made of."""

    @abstractmethod
    def num_bytes(self, dtype: torch.dtype) -> int:
        """Of its parameters after `load` in a model of `dtype`, without padding."""

    @abstractmethod
    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Make the parameters of them, which are on the CPU. `dtype` is the model's. Raises UserError for impossible values."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take for its own the parameters and buffers that a layer like this one had after `load`, out of `tensors`, by their names in it.

        Raises KeyError for one that is missing, and ValueError for one of another shape or dtype, as far as a kernel would read beyond it.
        """


GroupedProduct: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Of rows x [R, I], those from starts[i] to starts[i + 1] - 1 for layer number i, and starts int64 [layers + 1]: [R, O]."""


class JointLinear(PackedLinear):
    """One of those whose kernels multiply the same rows by several weights in one call."""

    kind: Hashable = None
    """Layers of a class and an equal kind are multiplied together; those of None, each alone."""

    @abstractmethod
    def multiply_together(self, x: Tensor, layers: Sequence[Self]) -> list[Tensor]:
        """The outputs [R, O] of at most three layers of this one's kind for x [R, I], to the bit what each gives alone."""

    @abstractmethod
    def multiply_swiglu(self, x: Tensor, up: Self) -> Tensor:
        """silu(this layer's output) * up's output, [R, O], to the bit what `swiglu` makes of the two."""

    @classmethod
    @abstractmethod
    def grouped(cls, layers: Sequence[Self], ups: Sequence[Self] | None = None) -> GroupedProduct:
        """Layers of one kind and shape without biases, each for rows of its own, in one call; with `ups` as gates, as `multiply_swiglu`.
        Bits are those of each alone; a layer without rows is not read."""

    def joins(self, other: nn.Module) -> bool:
        return isinstance(other, JointLinear) and type(other) is type(self) and other.kind == self.kind is not None


def linear_together(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """The outputs [R, O] of up to three layers that share their input x [R, I]: in one call if their weights are held alike."""
    first, *others = layers
    if isinstance(first, JointLinear) and all(first.joins(other) for other in others):
        return first.multiply_together(x, layers)  # type: ignore[arg-type]
    return [layer(x) for layer in layers]


def linear_swiglu(x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
    """silu(gate(x)) * up(x), [R, O], for x [R, I]: in one call if their weights are held alike."""
    if isinstance(gate, JointLinear) and gate.joins(up):
        return gate.multiply_swiglu(x, up)  # type: ignore[arg-type]
    return swiglu(gate(x), up(x))
