"""GLM-4-0414 (9B and 32B), from config.json: GLM with a norm behind each half of a layer, too."""

from torch import Tensor

from models.batch import Batch, LayerCache
from models.decoder import DecoderLayer, DecoderLM
from models.glm import MLP, Attention, GlmConfig
from models.layers.norm import RMSNorm


class Glm4DecoderLayer(DecoderLayer):
    def __init__(self, c: GlmConfig) -> None:
        super().__init__(c, Attention(c), MLP(c))
        self.post_self_attn_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_mlp_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        x = x + self.post_self_attn_layernorm(self.self_attn(self.input_layernorm(x), cos, sin, batch, cache))
        return x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))  # type: ignore[no-any-return]


class Glm4(DecoderLM):
    def __init__(self, c: GlmConfig) -> None:
        super().__init__(c, (Glm4DecoderLayer(c) for _ in range(c.num_hidden_layers)))
