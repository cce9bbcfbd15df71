"""Mamba-2 (arXiv 2405.21060), a recurrent layer of Granite 4, Bamba and other models.

T tokens, R output rows, E hidden channels, H heads of D channels, G groups of N state channels, K taps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.quantize_rows import Activations
from kernels.short_conv import short_conv
from kernels.ssd import ssd, state_shape
from models.batch import Batch, LayerState, StateShape, StateShapes
from models.config import ConfigReader
from models.layers.depthwise_conv import DepthwiseConv
from models.layers.gated_norm import GatedRMSNorm
from models.layers.layer_types import read_num_taps
from models.layers.linear import Linear
from models.layers.module import Module
from models.layers.rotary import Angles
from models.layers.tensor_parallel import ShardedChannels
from models.sharding import Shard, shard_heads

INFINITY = {"__float__": "Infinity"}
"""transformers' form of infinity in JSON."""


@dataclass(frozen=True)
class StateSpaceHeads:
    """The heads of a Mamba-2 layer. On a tensor-parallel rank these are the rank's heads only."""

    num_heads: int
    head_channels: int
    num_groups: int
    """A group of consecutive heads shares B and C."""
    state_channels: int

    @property
    def size(self) -> int:
        return self.num_heads * self.head_channels

    @property
    def group_size(self) -> int:
        """The channels of B or of C: G * N."""
        return self.num_groups * self.state_channels

    @property
    def conv_size(self) -> int:
        """The channels of x, B and C, which the convolution reads."""
        return self.size + 2 * self.group_size


@dataclass(frozen=True)
class Mamba2Config:
    heads: StateSpaceHeads
    num_taps: int
    """The tokens that a convolution reads, with the token itself."""
    has_bias: bool
    """Of in_proj."""
    has_output_bias: bool
    """Of out_proj."""
    has_conv_bias: bool
    eps: float
    step_limits: tuple[float, float]
    """The smallest and the largest time step."""


def read_mamba2(config: ConfigReader, hidden_size: int, eps: float) -> Mamba2Config:
    """Read the keys mamba_* of config.json, with defaults as in transformers. `eps`: of the layer's norm.

    `mamba_d_ssm`, of files that have it, is the number of the heads' channels. Raises UserError for unsupported values,
    and for sizes that contradict each other.
    """
    size, size_key = config.count("mamba_expand", 2) * hidden_size, "mamba_expand * hidden_size"
    if config.raw("mamba_d_ssm") is not None:
        size, size_key = config.count("mamba_d_ssm"), "mamba_d_ssm"
    num_heads, num_groups = config.count("mamba_n_heads", 128), config.count("mamba_n_groups", 1)
    config.check_multiple("mamba_n_heads", num_heads, "mamba_n_groups", num_groups)
    is_auto = config.raw("mamba_d_head", "auto") == "auto"
    head_channels = size // num_heads if is_auto else config.count("mamba_d_head")
    if head_channels * num_heads != size:
        problem = f"config.json: mamba_n_heads={num_heads} of mamba_d_head={head_channels} channels"
        raise UserError(f"{problem} are not the {size} channels of {size_key}")
    config.raw("mamba_chunk_size")  # of implementations that compute prompts in chunks
    has_bias = config.get("mamba_proj_bias", bool, False)
    return Mamba2Config(
        StateSpaceHeads(num_heads, head_channels, num_groups, config.count("mamba_d_state", 256)),
        read_num_taps(config, "mamba_d_conv"),
        has_bias=has_bias,
        has_output_bias=has_bias,
        has_conv_bias=config.get("mamba_conv_bias", bool, True),
        eps=eps,
        step_limits=read_step_limits(config),
    )


def read_heads_mamba2(config: ConfigReader, prefix: str, state_key: str, eps: float) -> Mamba2Config:
    """Read the keys of files that give the sizes of the heads, with defaults as in transformers.

    `prefix`: of the keys num_heads and head_dim. `state_key`: of the state channels. `eps`: of the layer's norm. Raises
    UserError for unsupported values, and for heads that do not divide among the groups.
    """
    heads = StateSpaceHeads(
        num_heads=config.count(f"{prefix}num_heads", 128),
        head_channels=config.count(f"{prefix}head_dim", 64),
        num_groups=config.count("n_groups", 8),
        state_channels=config.count(state_key, 128),
    )
    config.check_multiple(f"{prefix}num_heads", heads.num_heads, "n_groups", heads.num_groups)
    has_bias = config.get("use_bias", bool, False)
    return Mamba2Config(
        heads,
        read_num_taps(config, "conv_kernel"),
        has_bias=has_bias,
        has_output_bias=has_bias,
        has_conv_bias=config.get("use_conv_bias", bool, True),
        eps=eps,
        step_limits=read_step_limits(config),
    )


def read_step_limits(config: ConfigReader) -> tuple[float, float]:
    """Read `time_step_limit`. Raises UserError unless it is two numbers from 0 on in order."""
    stored = config.raw("time_step_limit")
    if stored is None:
        return 0.0, inf
    limits = [inf if limit == INFINITY else limit for limit in stored] if isinstance(stored, list) else []
    is_pair = len(limits) == 2 and all(type(limit) in (int, float) for limit in limits)
    if not is_pair or not 0 <= limits[0] < limits[1]:
        raise UserError(f"config.json: time_step_limit={stored!r} is not two numbers from 0 on, the smaller first")
    return float(limits[0]), float(limits[1])


class Mamba2(Module):
    """out_proj(norm(ssd(silu(conv(x, B, C)), dt) * silu(gate))), where in_proj's output is gate | x | B | C | dt."""

    rank_inputs: ShardedChannels | None = None
    """The channels of each rank's heads. The norm reads all of them. None: this rank has all heads."""

    def __init__(self, hidden_size: int, c: Mamba2Config, norm: Module | None = None) -> None:
        """`norm`: joins the heads' outputs and the gate, and is called as `GatedRMSNorm`, which is the default."""
        super().__init__()
        heads = c.heads
        self.in_proj = Linear(hidden_size, heads.size + heads.conv_size + heads.num_heads, c.has_bias)
        self._set_heads(heads, c.num_taps, c.has_conv_bias, torch.get_default_device())
        self.norm = GatedRMSNorm(heads.size, heads.num_groups, c.eps) if norm is None else norm
        self.out_proj = Linear(heads.size, hidden_size, c.has_output_bias)
        self.step_limits = c.step_limits

    def _set_heads(self, heads: StateSpaceHeads, num_taps: int, conv_bias: bool, device: torch.device) -> None:
        self.heads = heads
        with device:
            self.conv1d = DepthwiseConv(heads.conv_size, num_taps, conv_bias)
            self.A_log = nn.Parameter(torch.empty(heads.num_heads))
            self.D = nn.Parameter(torch.empty(heads.num_heads))
            self.dt_bias = nn.Parameter(torch.empty(heads.num_heads))
        matrices = state_shape(heads.num_heads, heads.state_channels, heads.head_channels)
        self.state_shapes: StateShapes = (
            StateShape((num_taps - 1, heads.conv_size)),
            StateShape(matrices, torch.float32),  # rounding accumulates
        )

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return [self.in_proj]

    @property
    def num_heads(self) -> tuple[int, int]:
        """The numbers of heads and of groups. They are shared out as query heads and key heads are."""
        return self.heads.num_heads, self.heads.num_groups

    def check_ranks(self, tp: int) -> None:
        """Raise UserError for more ranks than heads."""
        if tp > self.heads.num_heads:
            limit = f"the {self.heads.num_heads} heads of a recurrent layer of this model"
            raise UserError(f"tp={tp} is more than {limit}: give at most {self.heads.num_heads}")

    def shard(self, tp: int, rank: int) -> dict[str, Shard]:
        """Keep a rank's heads, and all of the norm. Return the shards of the tensors except out_proj's, by name.

        Raises UserError for more ranks than heads.
        """
        self.check_ranks(tp)
        heads, part = self.heads, shard_heads(*self.num_heads, tp, rank)
        x = _channels(part.queries, heads.head_channels)
        b = _channels(part.keys, heads.state_channels, heads.size)
        c = _channels(part.keys, heads.state_channels, heads.size + heads.group_size)
        in_projection = (_shifted(channels, heads.size) for channels in (x, b, c))  # after the gate
        steps = _shifted(part.queries, heads.size + heads.conv_size)
        shards = self.in_proj.shard((x, *in_projection, steps))
        shards = {f"in_proj.{name}": shard for name, shard in shards.items()}
        rank_heads = replace(heads, num_heads=len(part.queries), num_groups=len(part.keys))
        weight, has_bias = self.conv1d.weight, self.conv1d.bias is not None
        self._set_heads(rank_heads, weight.shape[2], has_bias, weight.device)
        shards |= {f"conv1d.{name}": Shard(0, (x, b, c)) for name, _ in self.conv1d.named_parameters()}
        return shards | dict.fromkeys(("A_log", "D", "dt_bias"), Shard(0, (part.queries,)))

    def project(self, x: Activations, batch: Batch) -> Tensor:
        """Return gate | x | B | C | dt of x [T, E]."""
        projected: Tensor = self.in_proj(x, batch)
        return projected

    def forward(self, x: Activations, _: Angles | None, batch: Batch, states: LayerState) -> Tensor:
        """Return [T, E], in the last layer [R, E]."""
        heads, (last_inputs, matrices) = self.heads, states.tensors
        gate, xbc, steps = self.project(x, batch).split((heads.size, heads.conv_size, heads.num_heads), 1)
        cuts = batch.query_starts, batch.state_reads, batch.state_writes, batch.state_ends
        xbc = short_conv(xbc, self.conv1d.taps, self.conv1d.bias, last_inputs, *cuts)
        group = heads.num_heads // heads.num_groups
        parameters = self.dt_bias, self.A_log, self.D, matrices, group, heads.head_channels, *self.step_limits
        mixed = batch.attending(ssd(xbc, steps, *parameters, *cuts, batch.context_lengths))
        gate = batch.attending(gate)
        if self.rank_inputs is not None:
            mixed, gate = self.rank_inputs.gather(mixed), self.rank_inputs.gather(gate)
        return self.out_proj(self.norm(mixed, gate), batch)


def _channels(heads: range, width: int, start: int = 0) -> range:
    """Return the channels of these heads, if the first head of all begins at `start`."""
    return range(start + heads.start * width, start + heads.stop * width)


def _shifted(indices: range, distance: int) -> range:
    return range(indices.start + distance, indices.stop + distance)
