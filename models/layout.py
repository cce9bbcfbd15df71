"""What the rest of the house must know of an architecture's modules. Each architecture declares it; nobody else knows their names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class Unit(Enum):
    """The part of a linear layer's outputs that a rank of tensor parallelism takes whole. Heads have equal widths within a layer."""

    QUERY_HEAD = auto()
    """A query head's channels."""
    KEY_VALUE_HEAD = auto()
    """A key or value head's channels."""
    QKV_HEAD = auto()
    """A head's query, key and value beside each other."""
    CHANNEL = auto()


HEADS: Mapping[str, tuple[Unit, ...]] = {
    "q_proj": (Unit.QUERY_HEAD,),
    "k_proj": (Unit.KEY_VALUE_HEAD,),
    "v_proj": (Unit.KEY_VALUE_HEAD,),
}
"""The units of Llama's projections to heads."""


@dataclass(frozen=True)
class ModelLayout:
    """Names of modules. The defaults are those of Llama and of the families that kept its names."""

    embedding: str = "model.embed_tokens"
    """The embedding of tokens, in the model."""
    layers: str = "model.layers"
    """The list of decoder layers, in the model."""
    final_norm: str = "model.norm"
    """The norm after the last decoder layer, in the model; a model without one ignores it."""
    head: str = "lm_head"
    """The layer that turns hidden states into logits, in the model."""
    attention: str = "self_attn"
    """The module that keeps keys and values, in a decoder layer. It has `heads`."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms whose outputs linear layers read, in a decoder layer."""
    norm_readers: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        }
    )
    """By a norm of a decoder layer the linear layers that read its output. A norm is left out if anything else reads it, too."""
    norm_weight_offset: float = 0.0
    """A norm multiplies by this plus its weight."""
    scale_fold_targets: Mapping[str, str] = field(default_factory=lambda: {"down_proj": "up_proj", "o_proj": "v_proj"})
    """By the last part of a linear layer's name the layer beside it whose output channels, times something, are its input channels."""
    row_parallel: tuple[str, ...] = ("o_proj", "down_proj")
    """Last parts of the names of linear layers that write into the residual stream: tensor parallelism divides their inputs, of all
    others the outputs."""
    replicated: tuple[str, ...] = ()
    """Last parts of the names of linear layers and embeddings that every rank of tensor parallelism has whole."""
    units: Mapping[str, tuple[Unit, ...]] = field(default_factory=lambda: HEADS)
    """By the last part of a linear layer's name the sections of its outputs, one after the other, each made of these units. A layer that
    is not named is made of channels."""
