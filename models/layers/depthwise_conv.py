"""The weight of a causal convolution of each channel, which kernels/short_conv computes.

C channels, K taps.
"""

import torch
from torch import Tensor, nn

from models.layers.module import Module


class DepthwiseConv(nn.Conv1d, Module):
    """Holds the weight [C, 1, K] and the bias [C]. It is not called."""

    def __init__(self, num_channels: int, num_taps: int, bias: bool, device: torch.device | None = None) -> None:
        super().__init__(num_channels, num_channels, num_taps, groups=num_channels, bias=bias, device=device)
        self._taps: Tensor | None = None

    def fuse(self) -> None:
        self._taps = self._taps_by_channel()

    @property
    def taps(self) -> Tensor:
        """The weight as the kernel reads it: [K, C]."""
        return self._taps_by_channel() if self._taps is None else self._taps

    def _taps_by_channel(self) -> Tensor:
        return self.weight.detach().squeeze(1).T.contiguous()
