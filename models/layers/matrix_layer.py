"""The base class of layers with a weight matrix.

R rows, I input channels, O output channels.
"""

import torch
from torch import Tensor, nn

from models.layers.linear_method import LinearMethod
from models.layers.module import Module


class MatrixLayer(Module):
    """A layer whose `method` holds a matrix [O, I]. The method may be replaced until the layer is loaded."""

    shape: tuple[int, int]
    """[O, I]"""
    is_quantizable: bool
    """Quantisation may replace the matrix by codes."""
    is_packable: bool
    """The matrix may be packed for the kernels."""
    weight: nn.Parameter
    """[O, I], or [I, O] if it is transposed. The attribute exists while the method is a `DenseMethod`."""

    def __init__(self) -> None:
        super().__init__()
        self._held: tuple[str, ...] = ()

    @property
    def method(self) -> LinearMethod:
        """The linear method. The layer registers the method's tensors, so that they are counted, and saved by name."""
        return self._method

    @method.setter
    def method(self, method: LinearMethod) -> None:
        self._method = method
        self._register()

    def _register(self) -> None:
        for name in self._held:
            delattr(self, name)
        held = self._method.held
        for name, tensor in held.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self._held = tuple(held)

    @property
    def held(self) -> tuple[str, ...]:
        """The names of the parameters and buffers that the method holds."""
        return self._held

    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Load the matrix, as `LinearMethod.load` does."""
        self._method.load(tensors, dtype, device)
        self._register()

    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Restore the matrix, as `LinearMethod.restore` does."""
        self._method.restore(tensors, dtype)
        self._register()
