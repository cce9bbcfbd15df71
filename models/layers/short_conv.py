"""The gated short convolution of LFM2 (arXiv 2511.23404), a recurrent layer: its state is its last few inputs.

T tokens, R output rows, E hidden channels, K taps.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.quantize_rows import Activations
from kernels.short_conv import short_conv
from models.batch import Batch, LayerState, StateShape, StateShapes
from models.layers.depthwise_conv import DepthwiseConv
from models.layers.linear import Linear
from models.layers.module import Module
from models.layers.rotary import Angles
from models.sharding import Shard, shard_channels


class ShortConv(Module):
    """out_proj(c * conv(b * x)), where in_proj's output is b | c | x. It has no activation."""

    num_heads = None
    """It is made of channels."""

    def __init__(self, hidden_size: int, num_taps: int, bias: bool) -> None:
        super().__init__()
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias)
        self.conv = DepthwiseConv(hidden_size, num_taps, bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias)
        self.state_shapes: StateShapes = (StateShape((num_taps - 1, hidden_size)),)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return [self.in_proj]

    def check_ranks(self, tp: int) -> None:
        """Raise UserError for more ranks than channels."""
        shard_channels(len(self.conv.weight), tp, 0)

    def shard(self, tp: int, rank: int) -> dict[str, Shard]:
        """Keep a rank's channels of in_proj and the convolution. Return the shards of their tensors by name."""
        weight = self.conv.weight
        num_channels, channels = len(weight), shard_channels(len(weight), tp, rank)
        sections = tuple(
            range(start + channels.start, start + channels.stop) for start in (0, num_channels, 2 * num_channels)
        )
        shards = {f"in_proj.{name}": shard for name, shard in self.in_proj.shard(sections).items()}
        size, num_taps, has_bias = len(channels), weight.shape[2], self.conv.bias is not None
        self.conv = DepthwiseConv(size, num_taps, has_bias, weight.device)
        self.state_shapes = (StateShape((num_taps - 1, size)),)
        return shards | {f"conv.{name}": Shard(0, (channels,)) for name, _ in self.conv.named_parameters()}

    def forward(self, x: Activations, _: Angles | None, batch: Batch, states: LayerState) -> Tensor:
        """Return [T, E], in the last layer [R, E]."""
        steps = batch.query_starts, batch.state_reads, batch.state_writes, batch.state_ends
        mixed = short_conv(self.in_proj(x, batch), self.conv.taps, self.conv.bias, states.tensors[0], *steps)
        return self.out_proj(batch.attending(mixed), batch)
