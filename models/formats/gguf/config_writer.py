"""Write a model's config as GGUF metadata, with the keys of llama.cpp's converter. The inverse of config.py."""

import logging
from collections.abc import Callable
from typing import Any

from gguf import GGUFWriter
from gguf.constants import ExpertGatingFuncType, RopeScalingType

from conf.errors import UserError
from models.decoder import DecoderConfig
from models.families.bloom import BloomConfig
from models.families.chatglm import ChatGLMConfig
from models.families.chatglm2 import ChatGLM2Config
from models.families.deepseek import DeepseekConfig
from models.families.gemma2 import Gemma2Config
from models.families.gemma3 import Gemma3Config
from models.families.gpt2 import GPT2Config
from models.families.mixtral import MixtralConfig
from models.families.phi3 import Phi3Config
from models.families.qwen import QwenConfig
from models.families.qwen2 import Qwen2Config
from models.families.qwen3 import Qwen3Config
from models.families.qwen3_moe import Qwen3MoeConfig
from models.formats.gguf.config import GEMMA_SCALED_BY_HIDDEN_SIZE, YARN_LOG
from models.layers.rotary import RotaryConfig, yarn_mscale

log = logging.getLogger(__name__)

GEMMA_FULL_EVERY = {"gemma2": 2, "gemma3": 6}
"""By architecture: every second or sixth layer has full attention."""
GEMMA3_SLIDING_THETA = 10000.0


def architecture_of(model_type: str, config: Any) -> str:
    """Return llama.cpp's name of a model's architecture. Raises UserError if llama.cpp has no such architecture."""
    if model_type not in WRITERS:
        raise UserError(f"model_type={model_type!r} cannot be written as GGUF: only {', '.join(sorted(WRITERS))}")
    if isinstance(config, ChatGLMConfig):
        raise _refuse("ChatGLM-6B")
    return WRITERS[model_type][0]


def add_config(writer: GGUFWriter, model_type: str, config: Any) -> None:
    """Write the keys of a model's config.

    Raises UserError for a setting that llama.cpp's architecture does not support.
    """
    WRITERS[model_type][1](writer, config)


def _refuse(what: str) -> UserError:
    return UserError(f"{what} cannot be written as GGUF: llama.cpp has none like it")


def _decoder(writer: GGUFWriter, c: DecoderConfig) -> None:
    if c.rotary.mscale_all_dim:
        raise _refuse("rope_scaling with mscale_all_dim outside DeepSeek")
    _sizes(writer, c)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    _rotary(writer, c.rotary)


def _sizes(writer: GGUFWriter, c: DecoderConfig | Phi3Config | DeepseekConfig) -> None:
    length = c.max_position_embeddings if isinstance(c, Phi3Config) else c.rotary.max_position_embeddings
    num_key_heads = c.num_attention_heads if isinstance(c, DeepseekConfig) else c.num_key_value_heads
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(num_key_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)


def _rotary(writer: GGUFWriter, rotary: RotaryConfig) -> None:
    writer.add_rope_dimension_count(rotary.head_dim)
    writer.add_rope_freq_base(rotary.theta)
    attention_factor = 1.0 if rotary.mscale_all_dim else yarn_mscale(rotary.factor, 1.0)
    has_own = rotary.type == "yarn" and rotary.attention_factor != attention_factor
    if rotary.type == "dynamic" or has_own or not rotary.truncate:
        raise _refuse(f"rope_scaling of type {rotary.type!r} with these fields")
    if rotary.type in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rotary.type))
        writer.add_rope_scaling_factor(rotary.factor)
    if rotary.type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary.original_length)
        writer.add_rope_scaling_yarn_beta_fast(rotary.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rotary.beta_slow)
    if rotary.mscale_all_dim:
        writer.add_rope_scaling_yarn_log_mul(YARN_LOG * rotary.mscale_all_dim)


def _llama(writer: GGUFWriter, c: DecoderConfig) -> None:
    _decoder(writer, c)
    if window := getattr(c, "sliding_window", None):
        writer.add_sliding_window(window)


def _mixtral(writer: GGUFWriter, c: MixtralConfig) -> None:
    _llama(writer, c)
    writer.add_expert_count(c.mixture.num_experts)
    writer.add_expert_used_count(c.mixture.num_experts_per_tok)


def _qwen(writer: GGUFWriter, c: QwenConfig) -> None:
    """Write the keys of the first Qwen.

    The inner size counts both matrices. The context length is the training length if the model scales longer texts.
    """
    length = c.max_position_embeddings
    if (c.use_dynamic_ntk or c.use_logn_attn) and c.seq_length < length:
        length = c.seq_length
        log.warning("llama.cpp has not the scalings of Qwen's longer texts: the file's context is %d tokens", length)
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rotary_emb_base)


def _chatglm(writer: GGUFWriter, c: ChatGLM2Config) -> None:
    if c.num_attention_heads * c.head_dim != c.hidden_size:
        raise _refuse("a ChatGLM whose heads have not hidden_size channels in all")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.rotary.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.ffn_hidden_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    _rotary(writer, c.rotary)


def _qwen2(writer: GGUFWriter, c: Qwen2Config | Qwen3Config) -> None:
    name = "Qwen3" if isinstance(c, Qwen3Config) else "Qwen2"
    if any(c.windows):
        raise _refuse(f"a {name} with sliding windows")
    if isinstance(c, Qwen3Config) and c.attention_bias:
        raise _refuse("a Qwen3 with attention_bias=true")
    _decoder(writer, c)


def _qwen3_moe(writer: GGUFWriter, c: Qwen3MoeConfig) -> None:
    mixture = c.mixture
    if c.capabilities.has_windows or c.attention_bias or not mixture.norm_topk_prob or not all(mixture.sparse_layers):
        what = "with sliding windows, attention_bias=true, norm_topk_prob=false or layers without experts"
        raise _refuse(f"a Qwen3-MoE {what},")
    _decoder(writer, c)
    writer.add_expert_count(mixture.num_experts)
    writer.add_expert_used_count(mixture.num_experts_per_tok)
    writer.add_expert_feed_forward_length(mixture.moe_intermediate_size)


def _gemma(writer: GGUFWriter, c: Gemma2Config, architecture: str) -> None:
    """Write the keys of Gemma. llama.cpp derives the attention scale and the windowed layers from the architecture."""
    by_hidden_size = c.num_hidden_layers == GEMMA_SCALED_BY_HIDDEN_SIZE[architecture]
    scale = c.hidden_size / c.num_attention_heads if by_hidden_size else c.head_dim
    if c.query_pre_attn_scalar != scale:
        raise _refuse(f"query_pre_attn_scalar={c.query_pre_attn_scalar:g}, where its scale is of {scale:g}")
    windows, interval = {window for window in c.windows if window}, GEMMA_FULL_EVERY[architecture]
    has_pattern = all((window is None) == (i % interval == 0) for i, window in enumerate(c.windows, 1))
    if not has_pattern or len(windows) != 1:
        raise _refuse(f"layer_types other than a full_attention for each {interval} layers")
    _decoder(writer, c)
    writer.add_sliding_window(windows.pop())
    if c.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(c.final_logit_softcapping)


def _gemma2(writer: GGUFWriter, c: Gemma2Config) -> None:
    if c.attn_logit_softcapping is None or c.final_logit_softcapping is None:
        raise _refuse("a Gemma 2 without a soft cap")
    _gemma(writer, c, "gemma2")
    writer.add_attn_logit_softcapping(c.attn_logit_softcapping)


def _gemma3(writer: GGUFWriter, c: Gemma3Config) -> None:
    if (c.sliding_rotary.type, c.sliding_rotary.theta) != ("default", GEMMA3_SLIDING_THETA):
        raise _refuse(f"rope_parameters of sliding_attention other than rope_theta={GEMMA3_SLIDING_THETA:g}")
    _gemma(writer, c, "gemma3")


def _phi3(writer: GGUFWriter, c: Phi3Config) -> None:
    _sizes(writer, c)
    writer.add_rope_dimension_count(2 * len(c.rotary.short_factor))
    writer.add_rope_freq_base(c.rotary.theta)
    writer.add_rope_scaling_orig_ctx_len(c.rotary.original_length)
    writer.add_sliding_window(c.sliding_window or 0)
    if {*c.rotary.short_factor, *c.rotary.long_factor} != {1.0}:
        writer.add_rope_scaling_attn_factors(c.rotary.attention_factor)


def _deepseek(writer: GGUFWriter, c: DeepseekConfig) -> None:
    """Write the keys of DeepSeek. Key and value lengths are per head, as before April 2025: kv_b_proj is one tensor."""
    if not c.rope_interleave or c.moe_layer_freq != 1:
        raise _refuse("a DeepSeek with rope_interleave=false or moe_layer_freq above 1")
    routing = c.routing
    _sizes(writer, c)
    writer.add_key_length(c.qk_nope_head_dim + c.qk_rope_head_dim)
    writer.add_value_length(c.v_head_dim)
    writer.add_kv_lora_rank(c.kv_lora_rank)
    if c.q_lora_rank is not None:
        writer.add_q_lora_rank(c.q_lora_rank)
    _rotary(writer, c.rotary)
    writer.add_leading_dense_block_count(c.first_k_dense_replace)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_count(routing.num_experts)
    writer.add_expert_used_count(routing.num_experts_per_tok)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_expert_weights_scale(routing.scaling_factor)
    writer.add_expert_weights_norm(routing.norm_topk_prob)
    is_v3 = routing.has_correction_bias
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID if is_v3 else ExpertGatingFuncType.SOFTMAX)
    if routing.n_group > 1:
        writer.add_expert_group_count(routing.n_group)
        writer.add_expert_group_used_count(routing.topk_group)


def _gpt2(writer: GGUFWriter, c: GPT2Config) -> None:
    if not c.scale_attn_weights or c.scale_attn_by_inverse_layer_idx or c.activation_function != "gelu_new":
        raise _refuse("a GPT-2 with another scale of attention or another activation than gelu_new")
    _without_rotary(writer, c, c.n_positions, c.n_embd, c.n_inner)


def _bloom(writer: GGUFWriter, c: BloomConfig) -> None:
    if c.apply_residual_connection_post_layernorm:
        raise _refuse("a BLOOM with apply_residual_connection_post_layernorm=true")
    _without_rotary(writer, c, c.seq_length, c.hidden_size, 4 * c.hidden_size)


def _without_rotary(
    writer: GGUFWriter, c: GPT2Config | BloomConfig, context_length: int, hidden_size: int, inner_size: int
) -> None:
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(context_length)
    writer.add_embedding_length(hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(inner_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_attention_heads)
    writer.add_layer_norm_eps(c.layer_norm_epsilon)


WRITERS: dict[str, tuple[str, Callable[[GGUFWriter, Any], None]]] = {
    "llama": ("llama", _llama),
    "mistral": ("llama", _llama),
    "mixtral": ("llama", _mixtral),
    "qwen": ("qwen", _qwen),
    "qwen2": ("qwen2", _qwen2),
    "qwen3": ("qwen3", _qwen2),
    "qwen3_moe": ("qwen3moe", _qwen3_moe),
    "gemma2": ("gemma2", _gemma2),
    "gemma3_text": ("gemma3", _gemma3),
    "phi3": ("phi3", _phi3),
    "glm": ("chatglm", _decoder),
    "glm4": ("glm4", _decoder),
    "chatglm": ("chatglm", _chatglm),
    "deepseek_v2": ("deepseek2", _deepseek),
    "deepseek_v3": ("deepseek2", _deepseek),
    "gpt2": ("gpt2", _gpt2),
    "bloom": ("bloom", _bloom),
}
"""llama.cpp's architecture, and the function that writes its keys, by model_type."""
