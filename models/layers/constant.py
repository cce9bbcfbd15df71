"""Tables that a model computes from its config."""

import torch
from torch import Tensor


class Constant:
    """No buffer of a module: it must not follow the model's dtype, and is made on the CPU also where a model is built without memory."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def on(self, device: torch.device) -> Tensor:
        """The values, brought there once: a copy in every step would wait for a GPU, and a CUDA graph could not hold it."""
        if self._values.device != device:
            self._values = self._values.to(device)
        return self._values
