"""Linear layers that rows may adapt. I input channels, O output channels."""

import torch
from torch import Tensor

from kernels.lora import AdapterTable
from models.layers.module import Module
from models.sharding import count


class LoRATarget(Module):
    """A linear layer as adapters see it: its shape, without its weight."""

    adapters: AdapterTable | None = None
    """Low-rank adapters that rows of a batch may have beside the weight; None where none was loaded that changes this layer."""
    outputs: tuple[range, ...] | None = None
    """The outputs of the whole layer that are this one's; None: all."""
    inputs: range | None = None
    """Its inputs, likewise."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """`shape`: (O, I)."""
        super().__init__()
        self.shape = self.whole_shape = shape

    def keep(self, outputs: tuple[range, ...]) -> None:
        """Keep some outputs."""
        self.outputs, self.shape = outputs, (count(outputs), self.shape[1])

    def keep_inputs(self, inputs: range) -> None:
        """Keep some inputs."""
        self.inputs, self.shape = inputs, (self.shape[0], len(inputs))

    def own(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return what belongs to this layer of the factors A [r, I] and B [O, r] of the whole."""
        if self.inputs is not None:
            a = a[:, self.inputs.start : self.inputs.stop].clone()
        if self.outputs is not None:
            b = torch.cat([b[each.start : each.stop] for each in self.outputs])
        return a, b
