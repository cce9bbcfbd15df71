"""GLM-4-0414 (9B and 32B), from config.json: GLM with a norm behind each half of a layer, too."""

from torch import Tensor

from models.batch import Batch, LayerCache
from models.decoder import DecoderLayer, DecoderLM
from models.glm import MLP, Attention, GlmConfig
from models.layers.norm import ResidualStream, RMSNorm


class Glm4DecoderLayer(DecoderLayer):
    def __init__(self, c: GlmConfig) -> None:
        super().__init__(c, Attention(c), MLP(c))
        self.post_self_attn_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_mlp_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, stream: ResidualStream, cos: Tensor, sin: Tensor, batch: Batch, cache: LayerCache
    ) -> ResidualStream:
        normed, x = self.input_layernorm(*stream)  # [T, E] each
        attended = self.self_attn(normed, cos, sin, batch, cache)
        normed, x = self.post_attention_layernorm(batch.attending(x), self.post_self_attn_layernorm(attended))
        return ResidualStream(x, self.post_mlp_layernorm(self.mlp(normed)))


class Glm4(DecoderLM):
    def __init__(self, c: GlmConfig) -> None:
        super().__init__(c, (Glm4DecoderLayer(c) for _ in range(c.num_hidden_layers)))
