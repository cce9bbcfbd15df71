"""GLM-4-0414 (9B and 32B): GLM with additional norms after attention and feed-forward."""

from models.batch import Batch, LayerCache
from models.decoder import DecoderLM
from models.families.glm import Glm, GlmConfig, GlmLayer
from models.layers.norm import ResidualStream, RMSNorm
from models.layers.rotary import Angles


class Glm4Layer(GlmLayer):
    def __init__(self, c: GlmConfig) -> None:
        super().__init__(c)
        self.post_self_attn_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_mlp_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, stream: ResidualStream, angles: Angles | None, batch: Batch, cache: LayerCache) -> ResidualStream:
        attention_norm, attention, mlp_norm, mlp = self.parts
        normed, x = attention_norm(*stream, attention.readers)  # [T, E] each
        attended = self.post_self_attn_layernorm(attention(normed, angles, batch, cache))
        normed, x = mlp_norm(batch.attending(x), attended, mlp.readers)
        return ResidualStream(x, self.post_mlp_layernorm(mlp(normed, batch)))


class Glm4(DecoderLM):
    layout = Glm.layout

    def __init__(self, c: GlmConfig) -> None:
        super().__init__(c, (Glm4Layer(c) for _ in range(c.num_hidden_layers)))
