"""Linear layers that adapters may change. I input channels, O output channels."""

import torch
from torch import Tensor

from kernels.lora import AdapterTable
from models.layers.module import Module
from models.sharding import count


class LoRATarget(Module):
    """A linear layer as adapters see it: its shape, without its weight."""

    adapters: AdapterTable | None = None
    """The adapters of this layer, by slot. None: no loaded adapter changes this layer."""
    outputs: tuple[range, ...] | None = None
    """The outputs of the whole layer that this rank has. None: all."""
    inputs: range | None = None
    """The inputs of the whole layer that this rank has. None: all."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """`shape`: (O, I) of the whole layer."""
        super().__init__()
        self.shape = self.whole_shape = shape

    def keep(self, outputs: tuple[range, ...]) -> None:
        """Keep a rank's outputs."""
        self.outputs, self.shape = outputs, (count(outputs), self.shape[1])

    def keep_inputs(self, inputs: range) -> None:
        """Keep a rank's inputs."""
        self.inputs, self.shape = inputs, (self.shape[0], len(inputs))

    def slice_factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the factors A [r, I] and B [O, r] of the whole layer."""
        if self.inputs is not None:
            a = a[:, self.inputs.start : self.inputs.stop].clone()
        if self.outputs is not None:
            b = torch.cat([b[output_range.start : output_range.stop] for output_range in self.outputs])
        return a, b
