"""Mixtral 8x7B and 8x22B: Mistral whose feed-forward layers are mixtures of experts (arXiv 2401.04088).

T tokens, E hidden channels, N experts.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from conf.errors import UserError
from kernels.moe import route
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig, DecoderLM, read_decoder_config
from models.layers.linear import FloatLinear, Linear, linear_swiglu
from models.layers.moe import Experts
from models.layers.norm import AddRMSNorm, ResidualStream
from models.layers.sliding_window import read_window


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    sliding_window: int | None
    num_local_experts: int
    num_experts_per_tok: int


def read_config(config: ConfigReader) -> MixtralConfig:
    experts, chosen = config.count("num_local_experts"), config.count("num_experts_per_tok")
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok={chosen} is more than num_local_experts={experts}")
    return MixtralConfig(
        **vars(read_decoder_config(config)),
        sliding_window=read_window(config),
        num_local_experts=experts,
        num_experts_per_tok=chosen,
    )


class Expert(nn.Module):
    def __init__(self, c: MixtralConfig) -> None:
        super().__init__()
        self.w1 = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.w2 = Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.w3 = Linear(c.hidden_size, c.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(linear_swiglu(x, self.w1, self.w3, into=self.w2))  # type: ignore[no-any-return]


class SparseMoeBlock(nn.Module):
    def __init__(self, c: MixtralConfig) -> None:
        super().__init__()
        self.num_experts_per_tok = c.num_experts_per_tok
        self.gate = FloatLinear(c.hidden_size, c.num_local_experts, bias=False)
        self.experts = Experts(
            (Expert(c) for _ in range(c.num_local_experts)), c.num_experts_per_tok, names=("w1", "w3", "w2")
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = route(self.gate(x), self.num_experts_per_tok, renormalise=True)  # from logits [T, N]
        return self.experts(x, weights, chosen)  # type: ignore[no-any-return]


class MixtralLayer(nn.Module):
    def __init__(self, c: MixtralConfig) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, c.sliding_window)
        self.post_attention_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.block_sparse_moe = SparseMoeBlock(c)

    def forward(
        self, stream: ResidualStream, cos: Tensor, sin: Tensor, batch: Batch, cache: LayerCache
    ) -> ResidualStream:
        normed, x = self.input_layernorm(*stream)  # [T, E] each
        normed, x = self.post_attention_layernorm(batch.attending(x), self.self_attn(normed, cos, sin, batch, cache))
        return ResidualStream(x, self.block_sparse_moe(normed))


class Mixtral(DecoderLM):
    row_parallel = ("o_proj", "w2")
    replicated = ("gate",)

    def __init__(self, c: MixtralConfig) -> None:
        super().__init__(c, (MixtralLayer(c) for _ in range(c.num_hidden_layers)))
