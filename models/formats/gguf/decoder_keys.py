"""Write the config of decoders with Llama's layers as GGUF metadata, with the keys of llama.cpp's converter."""

from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import RopeScalingType
from numpy.typing import NDArray

from conf.errors import UserError
from models.decoder import DecoderConfig
from models.families.deepseek_config import DeepseekConfig
from models.families.gemma2 import Gemma2Config
from models.families.gemma3 import Gemma3Config
from models.families.granite_hybrid import GraniteHybridConfig
from models.families.lfm2 import Lfm2Config
from models.families.mixtral import MixtralConfig
from models.families.phi3 import Phi3Config
from models.families.qwen2 import Qwen2Config
from models.families.qwen3 import Qwen3Config
from models.families.qwen3_moe import Qwen3MoeConfig
from models.formats.gguf.decoder_config import GEMMA_SCALED_BY_HIDDEN_SIZE, YARN_LOG
from models.formats.gguf.names import LONG_FACTORS, ROTARY_FACTORS, SHORT_FACTORS
from models.layers.rotary import RotaryConfig, llama3_factors, yarn_mscale

GEMMA_FULL_EVERY = {"gemma2": 2, "gemma3": 6}
"""By architecture: every second or sixth layer has full attention."""
GEMMA3_SLIDING_THETA = 10000.0


def unsupported(feature: str) -> UserError:
    return UserError(f"{feature} cannot be written as GGUF, because llama.cpp does not support it")


def add_decoder(writer: GGUFWriter, c: DecoderConfig) -> None:
    if c.rotary.mscale_all_dim:
        raise unsupported("rope_scaling with mscale_all_dim outside DeepSeek")
    add_sizes(writer, c)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    add_rotary(writer, c.rotary)


def add_sizes(writer: GGUFWriter, c: DecoderConfig | Phi3Config | DeepseekConfig) -> None:
    length = c.max_position_embeddings if isinstance(c, Phi3Config) else c.rotary.max_position_embeddings
    num_key_heads = c.num_attention_heads if isinstance(c, DeepseekConfig) else c.num_key_value_heads
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    by_layer = [0 if is_recurrent else num_key_heads for is_recurrent in c.recurrent_layers]
    writer.add_head_count_kv(by_layer if isinstance(c, (Lfm2Config, GraniteHybridConfig)) else num_key_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)


def add_rotary(writer: GGUFWriter, rotary: RotaryConfig) -> None:
    writer.add_rope_dimension_count(rotary.head_dim)
    writer.add_rope_freq_base(rotary.theta)
    attention_factor = 1.0 if rotary.mscale_all_dim else yarn_mscale(rotary.factor, 1.0)
    has_own = rotary.type == "yarn" and rotary.attention_factor != attention_factor
    if rotary.type == "dynamic" or has_own or not rotary.truncate:
        raise unsupported(f"rope_scaling of type {rotary.type!r} with these fields")
    if rotary.type in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rotary.type))
        writer.add_rope_scaling_factor(rotary.factor)
    if rotary.type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary.original_length)
        writer.add_rope_scaling_yarn_beta_fast(rotary.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rotary.beta_slow)
    if rotary.mscale_all_dim:
        writer.add_rope_scaling_yarn_log_mul(YARN_LOG * rotary.mscale_all_dim)


def add_llama(writer: GGUFWriter, c: DecoderConfig) -> None:
    add_decoder(writer, c)
    if window := getattr(c, "sliding_window", None):
        writer.add_sliding_window(window)


def add_mixtral(writer: GGUFWriter, c: MixtralConfig) -> None:
    add_llama(writer, c)
    writer.add_expert_count(c.mixture.num_experts)
    writer.add_expert_used_count(c.mixture.num_experts_per_tok)


def add_qwen2(writer: GGUFWriter, c: Qwen2Config | Qwen3Config) -> None:
    name = "Qwen3" if isinstance(c, Qwen3Config) else "Qwen2"
    if any(c.windows):
        raise unsupported(f"a {name} with sliding windows")
    if isinstance(c, Qwen3Config) and c.attention_bias:
        raise unsupported("a Qwen3 with attention_bias=true")
    add_decoder(writer, c)


def add_qwen3_moe(writer: GGUFWriter, c: Qwen3MoeConfig) -> None:
    mixture = c.mixture
    if c.capabilities.has_windows or c.attention_bias or not mixture.norm_topk_prob or not all(mixture.sparse_layers):
        features = "with sliding windows, attention_bias=true, norm_topk_prob=false or layers without experts"
        raise unsupported(f"a Qwen3-MoE {features},")
    add_decoder(writer, c)
    writer.add_expert_count(mixture.num_experts)
    writer.add_expert_used_count(mixture.num_experts_per_tok)
    writer.add_expert_feed_forward_length(mixture.moe_intermediate_size)


def _add_gemma(writer: GGUFWriter, c: Gemma2Config, architecture: str) -> None:
    """Write the keys of Gemma. llama.cpp derives the attention scale and the windowed layers from the architecture."""
    by_hidden_size = c.num_hidden_layers == GEMMA_SCALED_BY_HIDDEN_SIZE[architecture]
    scale = c.hidden_size / c.num_attention_heads if by_hidden_size else c.head_dim
    if c.query_pre_attn_scalar != scale:
        raise unsupported(f"query_pre_attn_scalar={c.query_pre_attn_scalar:g}, where llama.cpp uses {scale:g}")
    windows, interval = {window for window in c.windows if window}, GEMMA_FULL_EVERY[architecture]
    has_pattern = all((window is None) == (i % interval == 0) for i, window in enumerate(c.windows, 1))
    if not has_pattern or len(windows) != 1:
        raise unsupported(f"layer_types other than full_attention in every {interval}th layer")
    add_decoder(writer, c)
    writer.add_sliding_window(windows.pop())
    if c.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(c.final_logit_softcapping)


def add_gemma2(writer: GGUFWriter, c: Gemma2Config) -> None:
    if c.attn_logit_softcapping is None or c.final_logit_softcapping is None:
        raise unsupported("a Gemma 2 without a soft cap")
    _add_gemma(writer, c, "gemma2")
    writer.add_attn_logit_softcapping(c.attn_logit_softcapping)


def add_gemma3(writer: GGUFWriter, c: Gemma3Config) -> None:
    if (c.sliding_rotary.type, c.sliding_rotary.theta) != ("default", GEMMA3_SLIDING_THETA):
        raise unsupported(f"rope_parameters of sliding_attention other than rope_theta={GEMMA3_SLIDING_THETA:g}")
    _add_gemma(writer, c, "gemma3")


def add_phi3(writer: GGUFWriter, c: Phi3Config) -> None:
    add_sizes(writer, c)
    writer.add_rope_dimension_count(2 * len(c.rotary.short_factor))
    writer.add_rope_freq_base(c.rotary.theta)
    writer.add_rope_scaling_orig_ctx_len(c.rotary.original_length)
    writer.add_sliding_window(c.sliding_window or 0)
    if {*c.rotary.short_factor, *c.rotary.long_factor} != {1.0}:
        writer.add_rope_scaling_attn_factors(c.rotary.short_scale)


def rotary_factors(shape: Any) -> dict[str, NDArray[np.float32]]:
    """Return the tensors with divisors of the rotary frequencies, by name."""
    if isinstance(shape, Phi3Config):
        factors = {SHORT_FACTORS: shape.rotary.short_factor, LONG_FACTORS: shape.rotary.long_factor}
        is_scaled = {1.0} != {factor for values in factors.values() for factor in values}
        return {name: np.array(values, np.float32) for name, values in factors.items() if is_scaled}
    rotary = getattr(shape, "rotary", None)
    return {} if rotary is None or rotary.type != "llama3" else {ROTARY_FACTORS: llama3_factors(rotary).numpy()}
