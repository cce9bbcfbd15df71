"""The linear layer, and the forms that its weight may be held in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from kernels.linear import gpu_weight, linear
from kernels.linear.gpu_weight import GPUWeight, of_floats
from kernels.quantize_rows import QuantizedRows, RowCodes, Rows
from kernels.swiglu import swiglu, swiglu_quantize


class Piece(NamedTuple):
    """Where a layer's outputs are among those of all that share its input."""

    whole: "GPULinear"
    """A layer that has them all."""
    outputs: slice


class GPULinear(nn.Module, ABC):
    """A layer that may be one of several whose weights the kernels of a GPU read as one: experts', or such that share an input."""

    piece: Piece | None = None
    """Once it is joined with the others that share its input."""

    @property
    @abstractmethod
    def expert_kind(self) -> Hashable:
        """Experts' layers of an equal one are computed together; None: each alone."""

    @property
    @abstractmethod
    def input_kind(self) -> Hashable:
        """Layers of an equal one that share their input may be joined; None: this one may not."""

    @property
    @abstractmethod
    def gpu_weight(self) -> GPUWeight:
        """Of a layer that has one of these kinds."""

    @abstractmethod
    def keep(self, weight: GPUWeight) -> None:
        """Take this copy of `gpu_weight` for its own, a piece of all layers' weight."""

    @property
    def row_scale(self) -> Tensor | None:
        """float32 [], with which rows are quantised before the product, if it was chosen before."""
        return None

    @abstractmethod
    def with_weight(self, weight: GPUWeight, bias: nn.Parameter | None) -> Self:
        """A layer that does as this one with other outputs."""

    @abstractmethod
    def row_codes(self, num_rows: int, num_layers: int = 1, row_scales: Tensor | None = None) -> RowCodes | None:
        """What rows become before the product, where so many layers, of these `row_scales`, divide so many rows among them. None: nothing,
        or what only this layer makes of them."""


class Linear(nn.Linear, GPULinear):
    output_axis = 0  # of the weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    @property
    def expert_kind(self) -> Hashable:
        return self.gpu_weight.format if self.bias is None and self.weight.is_cuda else None

    @property
    def input_kind(self) -> Hashable:
        return self.gpu_weight.output_format if self.weight.is_cuda else None

    @property
    def gpu_weight(self) -> GPUWeight:
        return of_floats(self.weight.detach())

    def keep(self, weight: GPUWeight) -> None:
        self.weight = nn.Parameter(weight.codes, requires_grad=False)

    def with_weight(self, weight: GPUWeight, bias: nn.Parameter | None) -> "Linear":
        layer = Linear(weight.num_inputs, weight.num_outputs, bias is not None, device="meta")
        layer.keep(weight)
        if bias is not None:
            layer.bias = bias
        return layer

    def row_codes(self, num_rows: int, num_layers: int = 1, row_scales: Tensor | None = None) -> RowCodes | None:
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
        """Of its parameters after `load` in a model of `dtype`, without padding and compression."""

    @abstractmethod
    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Make the parameters of them, which are on the CPU. `dtype` is the model's. Raises UserError for impossible values."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Take for its own the parameters and buffers that a layer like this one had after `load` in a model of `dtype`, out of `tensors`,
        by their names in it.

        Raises KeyError for one that is missing, and ValueError for one that such a layer cannot have: of another shape or dtype, or with
        numbers by which a kernel would read beyond it.
        """


def take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of this name, out of `tensors`. Raises KeyError where it is missing, and ValueError where it is another."""
    tensor = tensors.pop(name)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{list(tensor.shape)} of {tensor.dtype}, not {list(shape)} of {dtype}, for its {name}")
    return tensor


GroupedProduct: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Of rows x [R, I], those from starts[i] to starts[i + 1] - 1 for layer number i, and starts int64 [layers + 1]: [R, O]."""


class JointLinear(PackedLinear):
    """One of those whose kernels multiply the same rows by several weights in one call."""

    kind: Hashable = None
    """Layers of a class and an equal kind are multiplied together; those of None, each alone."""

    @abstractmethod
    def multiply_together(self, x: Rows, layers: Sequence[Self]) -> list[Tensor]:
        """The outputs [R, O] of at most three layers of this one's kind for x [R, I], to the bit what each gives alone."""

    @abstractmethod
    def multiply_swiglu(self, x: Rows, up: Self) -> Tensor:
        """silu(this layer's output) * up's output, [R, O], to the bit what `swiglu` makes of the two."""

    @classmethod
    @abstractmethod
    def grouped(cls, layers: Sequence[Self], ups: Sequence[Self] | None = None) -> GroupedProduct:
        """Layers of one kind and shape without biases, each for rows of its own, in one call; with `ups` as gates, as `multiply_swiglu`.
        Bits are those of each alone; a layer without rows is not read."""

    def joins(self, other: nn.Module) -> bool:
        return isinstance(other, JointLinear) and type(other) is type(self) and other.kind == self.kind is not None


@runtime_checkable
class SharesInput(Protocol):
    """A module with layers that read one input."""

    @property
    def input_layers(self) -> Sequence[nn.Module]:
        """These, as `linear_together` or `linear_swiglu` takes them."""


def join(layers: Sequence[nn.Module]) -> None:
    """Let layers that share their input, on a GPU, lie in one weight, of which each keeps its piece. Others stay as they are.

    The pieces are views, by the names and of the sizes that were there before; what they were is freed.
    """
    found = [layer for layer in layers if isinstance(layer, GPULinear)]
    kinds = {(layer.input_kind, layer.bias is None) for layer in found}
    if len(layers) < 2 or len(found) < len(layers) or len(kinds) > 1 or found[0].input_kind is None:
        return
    weight = gpu_weight.join([layer.gpu_weight for layer in found])
    if weight is None:
        return
    biases = [part for layer in found if isinstance(part := layer.bias, Tensor)]
    bias = nn.Parameter(torch.cat(biases).detach(), requires_grad=False) if biases else None
    whole, start = found[0].with_weight(weight, bias), 0
    for layer in found:
        outputs = slice(start, start + layer.gpu_weight.num_outputs)
        layer.keep(weight.piece(outputs))
        if bias is not None:
            layer.bias = nn.Parameter(bias[outputs], requires_grad=False)
        layer.piece, start = Piece(whole, outputs), outputs.stop


def shared_row_codes(num_rows: int, layers: Sequence[nn.Module]) -> RowCodes | None:
    """What all these layers make of the rows [R, I] that they read, and nothing else does; None if one of them wants others, or floats."""
    wanted = {layer.row_codes(num_rows) if isinstance(layer, GPULinear) else None for layer in layers}
    return wanted.pop() if len(wanted) == 1 else None


def linear_together(x: Rows, *layers: nn.Module) -> list[Tensor]:
    """The outputs [R, O] of up to three layers that share their input x [R, I]: in one call if their weights are held alike.

    On a CPU with the bits of each alone. Of layers that were joined (`join`) they are views, whose rows lie apart, of one product, which
    a GPU may launch, and so add up, in another way than the product of one layer's outputs.
    """
    first, *others = layers
    if isinstance(first, JointLinear) and all(first.joins(other) for other in others):
        return first.multiply_together(x, layers)  # type: ignore[arg-type]
    pieces = [layer.piece for layer in layers if isinstance(layer, GPULinear) and layer.piece is not None]
    if len(pieces) < len(layers) or any(piece.whole is not pieces[0].whole for piece in pieces):
        return [layer(x) for layer in layers]
    y = pieces[0].whole(x)  # [R, outputs of all]
    return [y[:, piece.outputs] for piece in pieces]


def linear_swiglu(x: Rows, gate: nn.Module, up: nn.Module, into: nn.Module) -> Rows:
    """silu(gate(x)) * up(x), [R, O], for x [R, I] and for the layer `into` to read: in one call if the weights of gate and up are held
    alike, else as `swiglu_into`."""
    if isinstance(gate, JointLinear) and gate.joins(up):
        return gate.multiply_swiglu(x, up)  # type: ignore[arg-type]
    gate_rows, up_rows = linear_together(x, gate, up)
    return swiglu_into(gate_rows, up_rows, into)


def swiglu_into(gate: Tensor, up: Tensor, into: nn.Module) -> Rows:
    """silu(gate) * up, all [R, O], for the layer `into` to read: quantised, if that is what it makes of its rows."""
    codes = shared_row_codes(len(gate), [into])
    if codes is None:
        return swiglu(gate, up)
    return QuantizedRows(*swiglu_quantize(gate, up, codes.dtype, codes.group_size), gate.dtype, codes.group_size)
