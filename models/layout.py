"""What the rest of the house must know of an architecture's modules. Each architecture declares it; nobody else knows their names."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelLayout:
    """Names of modules. The defaults are those of Llama and of the families that kept its names."""

    layers: str = "model.layers"
    """The list of decoder layers, in the model."""
    norm_readers: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        }
    )
    """By a norm of a decoder layer the linear layers that read its output. A norm is left out if anything else reads it, too."""
