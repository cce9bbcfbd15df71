"""The names and roles of an architecture's modules.

Each architecture declares its own; no other code names its modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class Unit(Enum):
    """The unit in which tensor parallelism shards a linear layer's outputs. All heads of a layer have equal widths."""

    QUERY_HEAD = auto()
    """The channels of one query head."""
    KEY_VALUE_HEAD = auto()
    """The channels of one key or value head."""
    QKV_HEAD = auto()
    """The query, key and value of one head, adjacent."""
    CHANNEL = auto()


HEADS: Mapping[str, tuple[Unit, ...]] = {
    "q_proj": (Unit.QUERY_HEAD,),
    "k_proj": (Unit.KEY_VALUE_HEAD,),
    "v_proj": (Unit.KEY_VALUE_HEAD,),
}
"""The units of Llama's query, key and value projections."""


@dataclass(frozen=True)
class JoinedExperts:
    """The tensors of a checkpoint that hold all N experts of a layer, by their names in the module that has `experts`.

    E hidden channels, F channels of an expert. Biases [N, 2F] and [N, E] have the end `_bias`; blocks and scales of
    MXFP4, whose outputs are first, `_blocks` and `_scales`.
    """

    gate_up: str = "experts.gate_up_proj"
    """[N, 2F, E]."""
    down: str = "experts.down_proj"
    """[N, E, F]."""
    inputs_first: bool | None = None
    """Whether weights are [N, E, 2F] and [N, F, E]. None: files have either order, which their shapes show."""
    alternates: bool = False
    """Whether outputs of gates and ups alternate. If not, all gates of an expert are before its ups."""


@dataclass(frozen=True)
class ModelLayout:
    """Module names. The defaults are Llama's names, which most families use."""

    embedding: str = "model.embed_tokens"
    """The token embedding, in the model."""
    layers: str = "model.layers"
    """The list of decoder layers, in the model."""
    final_norm: str = "model.norm"
    """The norm after the last decoder layer, in the model. Unused by a model without this norm."""
    head: str = "lm_head"
    """The layer from hidden states to logits, in the model."""
    attention: str = "self_attn"
    """The attention module, in a decoder layer. It has `heads`."""
    recurrent: str = ""
    """The recurrent module, in a decoder layer without attention.

    It has `state_shapes`, `num_heads`, `check_ranks` and `shard`, which shards all of it except row-parallel layers.

    Empty: no layer is recurrent.
    """
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """The norms whose outputs linear layers read, in a decoder layer."""
    norm_weight_offset: float = 0.0
    """A norm multiplies by this offset plus its weight."""
    scale_fold_targets: Mapping[str, str] = field(default_factory=lambda: {"down_proj": "up_proj", "o_proj": "v_proj"})
    """For scale folding: a sibling layer by the last part of a linear layer's name.

    The output channels of the sibling, times a factor, are the input channels of the linear layer.
    """
    row_parallel: tuple[str, ...] = ("o_proj", "down_proj")
    """Last parts of the names of linear layers that write into the residual stream.

    Tensor parallelism shards their inputs, and the outputs of all other linear layers. If the module of such a layer has
    `rank_inputs`, it gathers the layer's inputs itself.
    """
    replicated: tuple[str, ...] = ()
    """Last parts of the names of linear layers and embeddings that are replicated on every tensor-parallel rank."""
    units: Mapping[str, tuple[Unit, ...]] = field(default_factory=lambda: HEADS)
    """For the last part of a linear layer's name, the unit of each section of its fused output.

    A layer without an entry is made of channels.
    """
    joined_experts: JoinedExperts = JoinedExperts()
    """How Hugging Face's layout joins experts, if it does."""
