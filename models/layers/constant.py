"""Tables that a model computes from its config."""

import torch
from torch import Tensor


class Constant:
    """A table cached per device.

    It is not a buffer: it keeps its dtype, and exists while the model is on the meta device.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def on(self, device: torch.device) -> Tensor:
        """Return the values on a device. The copy is made once.

        A copy in every step would wait for a GPU, and a CUDA graph could not contain it.
        """
        if self._values.device != device:
            self._values = self._values.to(device)
        return self._values
