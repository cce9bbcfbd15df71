"""GLM-4-0414 (9B and 32B): GLM with additional norms after attention and feed-forward."""

from models.decoder import BranchNormLayer, DecoderLM, InterleavedRopeAttention
from models.families.glm import Glm, GlmConfig
from models.layers.mlp import FusedMLP


class Glm4Layer(BranchNormLayer):
    branch_norms = ("post_self_attn_layernorm", "post_mlp_layernorm")


class Glm4(DecoderLM):
    layout = Glm.layout

    def __init__(self, c: GlmConfig) -> None:
        layers = (
            Glm4Layer(
                c, InterleavedRopeAttention(c, qkv_bias=c.attention_bias), FusedMLP(c.hidden_size, c.intermediate_size)
            )
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers)
