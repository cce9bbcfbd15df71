"""config.json of DeepSeek-V2 and -V3. N channels without position and P with position of a query or key head."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from conf.errors import UserError
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import PreNormShape
from models.layers.grouped_moe import Routing, read_routing
from models.layers.rotary import RotaryConfig, read_rotary_config, yarn_mscale


@dataclass(frozen=True)
class LatentConfig(PreNormShape):
    """The config of a model with multi-head latent attention."""

    intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_bias: bool

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)


@dataclass(frozen=True)
class LatentMoeConfig(LatentConfig):
    """The config of a model with multi-head latent attention and mixtures of experts."""

    moe_intermediate_size: int
    n_shared_experts: int
    routing: Routing


@dataclass(frozen=True)
class DeepseekConfig(LatentMoeConfig):
    first_k_dense_replace: int
    moe_layer_freq: int
    num_nextn_predict_layers: int
    rope_interleave: bool
    rotary: RotaryConfig
    predicts_ahead: bool = False

    @property
    def context_length(self) -> int:
        return self.rotary.context_length

    @property
    def capabilities(self) -> ModelCapabilities:
        return ModelCapabilities(
            keys_depend_on_length=self.rotary.type == "dynamic", predicts_ahead=self.predicts_ahead
        )

    def with_mtp_layer(self) -> "DeepseekConfig | None":
        return replace(self, predicts_ahead=True) if self.num_nextn_predict_layers else None

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(N + P), times yarn's temperature correction, once for queries and once for keys."""
        mscale = yarn_mscale(self.rotary.factor, self.rotary.mscale_all_dim)
        return mscale * mscale * super().softmax_scale

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
    return read_latent_decoder(config, routing, rope_interleave=True)


def read_config_v3(config: ConfigReader) -> DeepseekConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.expect("scoring_func", ("sigmoid",), "sigmoid")
    config.expect("topk_method", ("noaux_tc",), "noaux_tc")
    groups = config.count("n_group"), config.count("topk_group")
    norm_topk_prob = config.get("norm_topk_prob", bool, True)
    routing = read_routing(config, groups, has_correction_bias=True, norm_topk_prob=norm_topk_prob)
    return read_latent_decoder(config, routing, rope_interleave=config.get("rope_interleave", bool, True))


def read_num_nextn(config: ConfigReader, num_layers: int) -> int:
    """Read the number of multi-token prediction layers. Raises UserError unless it is from 0 to `num_layers`."""
    number = config.get("num_nextn_predict_layers", int, 0)
    if not 0 <= number <= num_layers:
        raise UserError(
            f"config.json: num_nextn_predict_layers={number} is not between 0 and num_hidden_layers={num_layers}"
        )
    return number


def read_latent_decoder(
    config: ConfigReader,
    routing: Routing,
    rope_interleave: bool,
    read_rotary: Callable[[ConfigReader, int, int], RotaryConfig] = read_rotary_config,
) -> DeepseekConfig:
    """Read the keys that do not depend on the version. `read_rotary` takes the arguments of `read_rotary_config`.

    Raises UserError for missing, mistyped or unsupported values.
    """
    num_layers = config.num_layers()
    shape = read_latent_shape(config)
    return DeepseekConfig(
        **shape,
        moe_intermediate_size=config.count("moe_intermediate_size"),
        n_shared_experts=config.count("n_shared_experts"),
        first_k_dense_replace=config.get("first_k_dense_replace", int, 0),
        moe_layer_freq=config.count("moe_layer_freq", 1),
        num_nextn_predict_layers=read_num_nextn(config, num_layers),
        rope_interleave=rope_interleave,
        rotary=read_rotary(config, shape["qk_rope_head_dim"], config.count("max_position_embeddings", 2048)),
        routing=routing,
    )


def read_latent_shape(
    config: ConfigReader, rms_norm_eps: float = 1e-6, v_head_dim: int | None = None, tie_word_embeddings: bool = False
) -> dict[str, Any]:
    """Return the fields of a `LatentConfig`. The arguments after `config` are defaults.

    Raises UserError for missing, mistyped or unsupported values.
    """
    heads, hidden_size = config.count("num_attention_heads"), config.count("hidden_size")
    config.activation(("silu",), "silu")
    config.expect("mlp_bias", (False, None), False)
    config.expect("num_key_value_heads", (heads, None), None)
    for derived in ("head_dim", "qk_head_dim"):  # newer versions of transformers write these derived keys
        config.raw(derived)
    rope_dim = config.count("qk_rope_head_dim")
    if rope_dim % 2:
        raise UserError(
            f"config.json: qk_rope_head_dim={rope_dim} is odd, but rotary embedding turns pairs of channels"
        )
    return {
        "vocab_size": config.count("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": config.count("intermediate_size"),
        "num_hidden_layers": config.num_layers(),
        "num_attention_heads": heads,
        "q_lora_rank": None if config.raw("q_lora_rank") is None else config.count("q_lora_rank"),
        "kv_lora_rank": config.count("kv_lora_rank"),
        "qk_nope_head_dim": config.count("qk_nope_head_dim"),
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": config.count("v_head_dim", v_head_dim),
        "rms_norm_eps": config.positive("rms_norm_eps", rms_norm_eps),
        "attention_bias": config.get("attention_bias", bool, False),
        "tie_word_embeddings": config.get("tie_word_embeddings", bool, tie_word_embeddings),
    }
