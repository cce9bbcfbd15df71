"""DeepSeek-V2 and -V3: multi-head latent attention and mixtures of many small experts (arXiv 2405.04434, 2412.19437).

T tokens, H query heads, E hidden channels, V vocabulary, R output rows; L channels of the latent; per head N channels
without position, P with position, D for values; X experts in C groups, K of them chosen per token.
Module names match the checkpoint's tensor names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.kv_store import kv_store
from kernels.moe import route, route_corrected
from kernels.quantize_rows import Activations
from kernels.rope import rope
from models.batch import Batch, KVCache, LayerCache
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import DecoderLayer, PreNormLM, PreNormShape
from models.layers.attention import Heads, attend_latent
from models.layers.linear import Linear, MergedLinear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.moe import Experts, Router
from models.layers.norm import AddRMSNorm, ResidualStream, RMSNorm
from models.layers.per_head import PerHead
from models.layers.rotary import Angles, RotaryConfig, RotaryEmbedding, read_rotary_config, yarn_mscale
from models.layout import ModelLayout, Unit

LATENT_NORM_EPS = 1e-6  # the eps of the norms within attention in the models' own code, independent of rms_norm_eps


@dataclass(frozen=True)
class Routing:
    """The settings that choose a token's experts and their weights."""

    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    scaling_factor: float
    has_correction_bias: bool
    """Whether V3's rule applies.

    V3: scores are sigmoids, a bias corrects them only for the choice, and a group's score is the sum of its best two
    experts. V2: scores are a softmax, and a group's score is its best expert.
    """
    norm_topk_prob: bool

    @property
    def is_plain(self) -> bool:
        """Whether a token's experts are the K highest softmax scores, regardless of groups."""
        return not self.has_correction_bias and self.topk_group == self.n_group


@dataclass(frozen=True)
class DeepseekConfig(PreNormShape):
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_shared_experts: int
    first_k_dense_replace: int
    moe_layer_freq: int
    num_nextn_predict_layers: int
    attention_bias: bool
    rope_interleave: bool
    rotary: RotaryConfig
    routing: Routing
    predicts_ahead: bool = False

    @property
    def context_length(self) -> int:
        return self.rotary.context_length

    @property
    def capabilities(self) -> ModelCapabilities:
        return ModelCapabilities(
            keys_depend_on_length=self.rotary.type == "dynamic", predicts_ahead=self.predicts_ahead
        )

    def predicting_ahead(self) -> "DeepseekConfig | None":
        return replace(self, predicts_ahead=True) if self.num_nextn_predict_layers else None

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(N + P), times yarn's temperature correction, once for queries and once for keys."""
        mscale = yarn_mscale(self.rotary.factor, self.rotary.mscale_all_dim)
        return mscale * mscale / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return tuple(map(self.has_experts, range(self.num_hidden_layers)))

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def read_config_v2(config: ConfigReader) -> DeepseekConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.expect("scoring_func", ("softmax",), "softmax")
    # The model's own code and transformers interpret true differently, and no published model uses it.
    config.expect("norm_topk_prob", (False, None), False)
    method = config.expect("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    if method == "greedy":
        for unused in ("n_group", "topk_group"):
            config.raw(unused)
    groups = (config.count("n_group"), config.count("topk_group")) if method == "group_limited_greedy" else (1, 1)
    routing = read_routing(config, groups, has_correction_bias=False, norm_topk_prob=False)
    return _read_config(config, routing, rope_interleave=True)


def read_config_v3(config: ConfigReader) -> DeepseekConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.expect("scoring_func", ("sigmoid",), "sigmoid")
    config.expect("topk_method", ("noaux_tc",), "noaux_tc")
    groups = config.count("n_group"), config.count("topk_group")
    norm_topk_prob = config.get("norm_topk_prob", bool, True)
    routing = read_routing(config, groups, has_correction_bias=True, norm_topk_prob=norm_topk_prob)
    return _read_config(config, routing, rope_interleave=config.get("rope_interleave", bool, True))


def read_routing(
    config: ConfigReader, groups: tuple[int, int], has_correction_bias: bool, norm_topk_prob: bool
) -> Routing:
    """Read the numbers of experts. `groups`: n_group and topk_group. Raises UserError for inconsistent numbers."""
    experts, chosen = config.count("n_routed_experts"), config.count("num_experts_per_tok")
    n_group, topk_group = groups
    config.check_multiple("n_routed_experts", experts, "n_group", n_group)
    if topk_group > n_group:
        raise UserError(f"config.json: topk_group={topk_group} is more than n_group={n_group}")
    size = experts // n_group
    if has_correction_bias and size < 2:
        raise UserError(f"config.json: n_group={n_group} leaves {size} expert to a group, which needs 2 to be scored")
    if chosen > topk_group * size:
        raise UserError(
            f"config.json: num_experts_per_tok={chosen} is more than the {topk_group * size} experts of topk_group={topk_group} groups"
        )
    scaling_factor = config.positive("routed_scaling_factor", 1.0)
    return Routing(experts, chosen, n_group, topk_group, scaling_factor, has_correction_bias, norm_topk_prob)


def read_num_nextn(config: ConfigReader, num_layers: int) -> int:
    """Read the number of multi-token prediction layers. Raises UserError unless it is from 0 to `num_layers`."""
    number = config.get("num_nextn_predict_layers", int, 0)
    if not 0 <= number <= num_layers:
        raise UserError(
            f"config.json: num_nextn_predict_layers={number} is not between 0 and num_hidden_layers={num_layers}"
        )
    return number


def _read_config(config: ConfigReader, routing: Routing, rope_interleave: bool) -> DeepseekConfig:
    heads = config.count("num_attention_heads")
    config.activation(("silu",), "silu")
    config.expect("mlp_bias", (False, None), False)
    config.expect("num_key_value_heads", (heads, None), None)
    for derived in ("head_dim", "qk_head_dim"):  # newer versions of transformers write these derived keys
        config.raw(derived)
    rank, rope_dim = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    if rope_dim % 2:
        raise UserError(
            f"config.json: qk_rope_head_dim={rope_dim} is odd, but rotary embedding turns pairs of channels"
        )
    num_layers = config.num_layers()
    return DeepseekConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size"),
        moe_intermediate_size=config.count("moe_intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        q_lora_rank=None if config.raw("q_lora_rank") is None else config.count("q_lora_rank"),
        kv_lora_rank=rank,
        qk_nope_head_dim=config.count("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=config.count("v_head_dim"),
        n_shared_experts=config.count("n_shared_experts"),
        first_k_dense_replace=config.get("first_k_dense_replace", int, 0),
        moe_layer_freq=config.count("moe_layer_freq", 1),
        num_nextn_predict_layers=read_num_nextn(config, num_layers),
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        attention_bias=config.get("attention_bias", bool, False),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        rope_interleave=rope_interleave,
        rotary=read_rotary_config(config, rope_dim, config.count("max_position_embeddings", 2048)),
        routing=routing,
    )


class Attention(Module):
    """Multi-head latent attention in its absorbed form (arXiv 2405.04434, section 2.1).

    The models' own code computes a key and a value per head for every earlier token from the token's latent c: q (B c)
    and sum(w (A c)). This code multiplies the smaller side instead: (q B) c and A sum(w c). The cache therefore holds
    only latents.
    """

    def __init__(self, c: DeepseekConfig) -> None:
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
        """As of `decoder.Attention`."""
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

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        c = self.c
        query, latent = self.first(x, batch)
        if c.q_lora_rank is not None:
            query = self.q_b_proj(self.q_a_layernorm(query, [self.q_b_proj]), batch)
        query = query.unflatten(-1, (-1, c.qk_nope_head_dim + c.qk_rope_head_dim))  # [T, H, N + P]
        query, query_rope = query.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        latent, key_rope = latent[:, None].split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        query_rope, key_rope = (rope(part, *angles, c.rope_interleave) for part in (query_rope, key_rope))
        query = torch.cat((self.to_key(query, self._key_weight), query_rope), dim=-1)  # [T, H, L + P]
        key = torch.cat((self.kv_a_layernorm(latent), key_rope), dim=-1)  # [T, 1, L + P]
        kv_store(key, key[..., :0], *cache, batch.slots)
        attended = attend_latent(query, c.kv_lora_rank, cache, batch, c.softmax_scale)  # [T, H, L]
        return self.o_proj(self.to_value(attended, self._value_weight).flatten(1), batch)


class Gate(Router):
    """Routing in float32, limited to the best groups of experts (V2: section 2.2.2 of its paper; V3: section 2.1.2)."""

    def __init__(self, hidden_size: int, routing: Routing) -> None:
        super().__init__(hidden_size, routing.num_experts)
        self.routing = routing
        if routing.has_correction_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(routing.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, E]; returns as `route` does."""
        r = self.routing
        logits = self.logits(x)  # [T, X]
        if r.has_correction_bias:
            groups, correction = (r.n_group, r.topk_group), self.e_score_correction_bias
            weights, chosen = route_corrected(
                logits, correction, r.num_experts_per_tok, r.norm_topk_prob, False, *groups
            )
        elif r.is_plain:
            weights, chosen = route(logits, r.num_experts_per_tok, r.norm_topk_prob)
        else:
            weights, chosen = self._choose_in_groups(logits.softmax(-1))
        return weights * r.scaling_factor, chosen

    def _choose_in_groups(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the K highest of scores [T, X] within the best groups, and their experts: [T, K] each.

        A group's score is the score of its best expert.
        """
        r = self.routing
        grouped = scores.unflatten(-1, (r.n_group, -1))  # [T, C, X/C]
        best = grouped.topk(1).values[..., 0]  # [T, C]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(r.topk_group).indices, True)
        chosen = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(r.num_experts_per_tok).indices
        return scores.gather(-1, chosen), chosen


class MoE(Module):
    """K routed experts per token, and shared experts for all tokens."""

    readers: Sequence[Linear] = ()
    """As of `SparseMoeBlock`."""

    def __init__(self, hidden_size: int, moe_intermediate_size: int, n_shared_experts: int, routing: Routing) -> None:
        super().__init__()
        self.gate = Gate(hidden_size, routing)
        experts = (MLP(hidden_size, moe_intermediate_size) for _ in range(routing.num_experts))
        self.experts = Experts(experts, routing.num_experts_per_tok)
        self.shared_experts = MLP(hidden_size, moe_intermediate_size * n_shared_experts)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        weights, chosen = self.gate(x)
        routed: Tensor = self.experts(x, weights, chosen)
        shared: Tensor = self.shared_experts(x, batch)
        return routed + shared


def _mlp(c: DeepseekConfig, sparse: bool) -> nn.Module:
    if sparse:
        return MoE(c.hidden_size, c.moe_intermediate_size, c.n_shared_experts, c.routing)
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
        stream = self(ResidualStream(self.eh_proj(both, batch)), angles, batch.of_output_rows(), cache)
        normed: Tensor = self.shared_head["norm"](*stream)[0]
        return normed


class Deepseek(PreNormLM):
    config: DeepseekConfig
    layout = ModelLayout(
        norms=("input_layernorm", "self_attn.q_a_layernorm", "post_attention_layernorm"),
        scale_fold_targets={"down_proj": "up_proj"},
        replicated=("q_a_proj", "kv_a_proj_with_mqa", "eh_proj"),
        units=dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj"), (Unit.QUERY_HEAD,)),
    )
    # bfloat16 cannot separate the scores of many experts. A bfloat16 weight would also be converted in every step.
    float32_tensors = ("e_score_correction_bias", "mlp.gate.weight")

    def __init__(self, c: DeepseekConfig) -> None:
        layers = (
            (DecoderLayer if i < c.num_hidden_layers else NextTokenLayer)(c, Attention(c), _mlp(c, c.has_experts(i)))
            for i in range(c.num_hidden_layers + c.predicts_ahead)
        )
        super().__init__(c, layers, RotaryEmbedding(c.rotary))

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        first = self.config.num_hidden_layers  # the multi-token prediction layers follow the decoder layers
        prefixes = [f"model.layers.{first + i}." for i in range(self.config.num_nextn_predict_layers)]
        if self.config.predicts_ahead:  # the layer's copies of the model's embedding and head
            prefixes[:1] = [f"{prefixes[0]}{copy}." for copy in ("embed_tokens", "shared_head.head")]
        return tuple(prefixes)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return super().forward(batch, KVCache(cache.layers[: len(self.own_layers)]))

    def predict_ahead(self, hidden: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        layer = self.layers[-1]
        assert isinstance(layer, NextTokenLayer)
        inputs = self.layer_inputs(batch, cache.dtype)
        return layer.predict(self.embedding(batch.token_ids), hidden, *inputs, batch, cache.layers[-1])
