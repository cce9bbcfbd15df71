"""DeepSeek-V2 and -V3: multi-head latent attention and mixtures of many small experts (arXiv 2405.04434, 2412.19437).

T tokens, H query heads, E hidden channels, V vocabulary, R output rows; L channels of the latent; per head N channels
without position, P with position, D for values.
Module names match the checkpoint's tensor names.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kernels.kv_store import kv_store
from kernels.quantize_rows import Activations
from kernels.rope import rope
from models.batch import Batch, KVCache, LayerCache
from models.decoder import DecoderLayer, PreNormLM, Rotary
from models.families.deepseek_config import DeepseekConfig, LatentConfig
from models.layers.attention import Heads, attend_latent
from models.layers.grouped_moe import GroupedMoE
from models.layers.linear import Linear, MergedLinear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.norm import AddRMSNorm, ResidualStream, RMSNorm
from models.layers.per_head import PerHead
from models.layers.rotary import Angles, RotaryEmbedding
from models.layout import ModelLayout, Unit

LATENT_NORM_EPS = 1e-6  # the eps of the norms within attention in the models' own code, independent of rms_norm_eps


class LatentAttention(Module):
    """Multi-head latent attention in its absorbed form (arXiv 2405.04434, section 2.1), without position encoding.

    The models' own code computes a key and a value per head for every earlier token from the token's latent c: q (B c)
    and sum(w (A c)). This code multiplies the smaller side instead: (q B) c and A sum(w c). The cache therefore holds
    only latents.
    """

    def __init__(self, c: LatentConfig) -> None:
        super().__init__()
        self.c = c
        # All heads share one key: the latent, and the part with position. Values are computed from the latent.
        self.heads = Heads(c.num_attention_heads, 1, c.kv_lora_rank + c.qk_rope_head_dim, 0)
        query_size = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        first = {}
        if c.q_lora_rank is None:
            self.q_proj = first["q_proj"] = Linear(c.hidden_size, query_size, bias=False)
        else:
            self.q_a_proj = first["q_a_proj"] = Linear(c.hidden_size, c.q_lora_rank, bias=c.attention_bias)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(c.q_lora_rank, query_size, bias=False)
        latent = Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=c.attention_bias)
        self.first = MergedLinear(self, {**first, "kv_a_proj_with_mqa": latent})
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, LATENT_NORM_EPS)
        to_heads = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.kv_b_proj = Linear(c.kv_lora_rank, to_heads, bias=False, is_quantizable=False, is_packable=False)
        self.to_key, self.to_value = PerHead(), PerHead()
        self.o_proj = Linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, bias=c.attention_bias)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return self.first.layers

    def fuse(self) -> None:
        self.first.merge()
        self.to_key.pack(self._key_weight())
        self.to_value.pack(self._value_weight())

    def _key_weight(self) -> Tensor:
        """Return the transposed matrices from latents to each head's keys, [H, L, N]."""
        return self._to_heads()[0].transpose(1, 2)

    def _value_weight(self) -> Tensor:
        """Return the matrices from latents to each head's values, [H, D, L]."""
        return self._to_heads()[1]

    def _to_heads(self) -> tuple[Tensor, Tensor]:
        sizes = self.c.qk_nope_head_dim, self.c.v_head_dim
        to_key, to_value = self.kv_b_proj.weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        return to_key, to_value

    def rotate(self, part: Tensor, angles: Any) -> Tensor:
        """Return the rotated part with position of queries or of the key."""
        return part

    def scale(self, query: Tensor, angles: Any) -> Tensor:
        """Return the queries [T, H, L + P] as they are before the product with the keys."""
        return query

    def forward(self, x: Activations, angles: Any, batch: Batch, cache: LayerCache) -> Tensor:
        c = self.c
        query, latent = self.first(x, batch)
        if c.q_lora_rank is not None:
            query = self.q_b_proj(self.q_a_layernorm(query, [self.q_b_proj]), batch)
        query = query.unflatten(-1, (-1, c.qk_nope_head_dim + c.qk_rope_head_dim))  # [T, H, N + P]
        query, query_rope = query.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        latent, key_rope = latent[:, None].split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        query_rope, key_rope = (self.rotate(part, angles) for part in (query_rope, key_rope))
        query = torch.cat((self.to_key(query, self._key_weight), query_rope), dim=-1)  # [T, H, L + P]
        query = self.scale(query, angles)
        key = torch.cat((self.kv_a_layernorm(latent), key_rope), dim=-1)  # [T, 1, L + P]
        kv_store(key, key[..., :0], *cache, batch.slots)
        attended = attend_latent(query, c.kv_lora_rank, cache, batch, c.softmax_scale)  # [T, H, L]
        return self.o_proj(self.to_value(attended, self._value_weight).flatten(1), batch)


class Attention(LatentAttention):
    """Multi-head latent attention with rotary embedding."""

    def __init__(self, c: LatentConfig, rope_interleave: bool) -> None:
        super().__init__(c)
        self.rope_interleave = rope_interleave

    def rotate(self, part: Tensor, angles: Any) -> Tensor:
        cos, sin = angles
        return rope(part, cos, sin, self.rope_interleave)


def _mlp(c: DeepseekConfig, sparse: bool) -> nn.Module:
    if sparse:
        return GroupedMoE(c.hidden_size, c.moe_intermediate_size, c.n_shared_experts, c.routing)
    return MLP(c.hidden_size, c.intermediate_size)


class NextTokenLayer(DecoderLayer):
    """V3's first multi-token prediction module (arXiv 2412.19437, section 2.2).

    It uses the model's own embedding and head.
    The order of the projected halves and of the norms of both inputs follows the checkpoints. Both hidden states that
    the module reads, the model's and its own, are taken after a final norm, as in vLLM and SGLang.
    """

    def __init__(self, c: DeepseekConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__(c, self_attn, mlp)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        # It is float even in checkpoints whose other layers are quantised.
        self.eh_proj = Linear(2 * c.hidden_size, c.hidden_size, bias=False, is_quantizable=False)
        self.shared_head = nn.ModuleDict({"norm": AddRMSNorm(c.hidden_size, c.rms_norm_eps)})

    def predict(
        self, embedded: Tensor, hidden: Tensor, angles: Angles | None, batch: Batch, cache: LayerCache
    ) -> Tensor:
        """Return normed hidden states [R, E].

        embedded: the embeddings of tokens [T, E].
        hidden: the hidden states [T, E] of the tokens before them.
        """
        both = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)  # [T, 2 * E]
        stream = self(ResidualStream(self.eh_proj(both, batch)), angles, batch.select_output_rows(), cache)
        normed: Tensor = self.shared_head["norm"](*stream)[0]
        return normed


class Deepseek(PreNormLM):
    config: DeepseekConfig
    attention: type[Attention] = Attention
    layout = ModelLayout(
        norms=("input_layernorm", "self_attn.q_a_layernorm", "post_attention_layernorm"),
        scale_fold_targets={"down_proj": "up_proj"},
        replicated=("q_a_proj", "kv_a_proj_with_mqa", "eh_proj"),
        units=dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj"), (Unit.QUERY_HEAD,)),
    )
    # bfloat16 cannot separate the scores of many experts. A bfloat16 weight would also be converted in every step.
    float32_tensors = ("e_score_correction_bias", "mlp.gate.weight")

    def __init__(self, c: DeepseekConfig, rotary: Rotary | None = None) -> None:
        """`rotary`: None for `c.rotary`."""
        layers = (
            (DecoderLayer if i < c.num_hidden_layers else NextTokenLayer)(
                c, self.attention(c, c.rope_interleave), _mlp(c, c.has_experts(i))
            )
            for i in range(c.num_hidden_layers + c.predicts_ahead)
        )
        super().__init__(c, layers, rotary or RotaryEmbedding(c.rotary))

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        first = self.config.num_hidden_layers  # the multi-token prediction layers follow the decoder layers
        prefixes = [f"model.layers.{first + i}." for i in range(self.config.num_nextn_predict_layers)]
        if self.config.predicts_ahead:  # the layer's copies of the model's embedding and head
            prefixes[:1] = [f"{prefixes[0]}{copy}." for copy in ("embed_tokens", "shared_head.head")]
        return tuple(prefixes)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return super().forward(batch, replace(cache, layers=cache.layers[: len(self.local_layers)]))

    def predict_ahead(self, hidden: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        layer = self.layers[-1]
        assert isinstance(layer, NextTokenLayer)
        inputs = self.layer_inputs(batch, cache.dtype)
        return layer.predict(self.embedding(batch.token_ids), hidden, *inputs, batch, cache.attention_layers[-1])
