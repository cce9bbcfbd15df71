"""Write a model's config as GGUF metadata, with the keys of llama.cpp's converter. The inverse of config.py.

The keys of decoders with Llama's layers are in decoder_keys.py, of models with recurrent layers in recurrent_keys.py.
"""

import logging
from collections.abc import Callable
from typing import Any

from gguf import GGUFWriter
from gguf.constants import ExpertGatingFuncType

from conf.errors import UserError
from models.decoder import AttentionConfig
from models.families.bloom import BloomConfig
from models.families.chatglm import ChatGLMConfig
from models.families.chatglm2 import ChatGLM2Config
from models.families.deepseek_config import DeepseekConfig
from models.families.gpt2 import GPT2Config
from models.families.gpt_bigcode import GPTBigCodeConfig
from models.families.mpt import MptConfig
from models.families.qwen import QwenConfig
from models.formats.gguf.decoder_keys import (
    add_decoder,
    add_gemma2,
    add_gemma3,
    add_llama,
    add_mixtral,
    add_phi3,
    add_qwen2,
    add_qwen3_moe,
    add_rotary,
    add_sizes,
    unsupported,
)
from models.formats.gguf.recurrent_keys import (
    add_falcon_h1,
    add_granite,
    add_granite_hybrid,
    add_kimi_linear,
    add_lfm2,
    add_lfm2_moe,
    add_mamba2,
    add_nemotron_h,
    add_qwen3_next,
    add_qwen35,
    add_qwen35_moe,
    recurrent_architecture,
)

log = logging.getLogger(__name__)


def architecture_of(model_type: str, config: Any) -> str:
    """Return llama.cpp's name of a model's architecture. Raises UserError if llama.cpp has no such architecture."""
    if model_type not in WRITERS:
        raise UserError(f"model_type={model_type!r} cannot be written as GGUF: only {', '.join(sorted(WRITERS))}")
    if isinstance(config, ChatGLMConfig):
        raise unsupported("ChatGLM-6B")
    return recurrent_architecture(config) or WRITERS[model_type][0]


def add_config(writer: GGUFWriter, model_type: str, config: Any) -> None:
    """Write the keys of a model's config.

    Raises UserError for a setting that llama.cpp's architecture does not support.
    """
    WRITERS[model_type][1](writer, config)


def _add_qwen(writer: GGUFWriter, c: QwenConfig) -> None:
    """Write the keys of the first Qwen.

    The inner size counts both matrices. The context length is the training length if the model scales longer texts.
    """
    length = c.max_position_embeddings
    if (c.use_dynamic_ntk or c.use_logn_attn) and c.seq_length < length:
        length = c.seq_length
        log.warning("llama.cpp lacks Qwen's scalings for longer texts: the file's context length is %d tokens", length)
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


def _add_chatglm(writer: GGUFWriter, c: ChatGLM2Config) -> None:
    if c.num_attention_heads * c.head_dim != c.hidden_size:
        raise unsupported("a ChatGLM with num_attention_heads * head_dim other than hidden_size")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.rotary.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.ffn_hidden_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    add_rotary(writer, c.rotary)


def _add_deepseek(writer: GGUFWriter, c: DeepseekConfig) -> None:
    """Write the keys of DeepSeek. Key and value lengths are per head, as before April 2025: kv_b_proj is one tensor."""
    if not c.rope_interleave or c.moe_layer_freq != 1:
        raise unsupported("a DeepSeek with rope_interleave=false or moe_layer_freq above 1")
    routing = c.routing
    add_sizes(writer, c)
    writer.add_key_length(c.qk_nope_head_dim + c.qk_rope_head_dim)
    writer.add_value_length(c.v_head_dim)
    writer.add_kv_lora_rank(c.kv_lora_rank)
    if c.q_lora_rank is not None:
        writer.add_q_lora_rank(c.q_lora_rank)
    add_rotary(writer, c.rotary)
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


def _add_gpt2(writer: GGUFWriter, c: GPT2Config) -> None:
    if not c.scale_attn_weights or c.scale_attn_by_inverse_layer_idx or c.activation_function != "gelu_new":
        raise unsupported("a GPT-2 with another attention scale, or an activation other than gelu_new")
    _add_without_rotary(writer, c, c.max_position_embeddings, c.intermediate_size, c.rms_norm_eps)


def _add_starcoder(writer: GGUFWriter, c: GPTBigCodeConfig) -> None:
    if c.num_key_value_heads > 1 or not c.scale_attn_weights or c.activation_function == "gelu":
        raise unsupported("a GPT-BigCode with multi_query=false, another attention scale or activation_function=gelu")
    _add_without_rotary(writer, c, c.max_position_embeddings, c.intermediate_size, c.rms_norm_eps)


def _add_mpt(writer: GGUFWriter, c: MptConfig) -> None:
    if c.softmax_scale != c.head_dim**-0.5:
        raise unsupported("an MPT with softmax_scale")
    _add_without_rotary(writer, c, c.max_seq_len, c.intermediate_size, c.rms_norm_eps)
    writer.add_max_alibi_bias(8.0)
    if c.clip_qkv is not None:
        writer.add_clamp_kqv(c.clip_qkv)


def _add_bloom(writer: GGUFWriter, c: BloomConfig) -> None:
    if c.apply_residual_connection_post_layernorm:
        raise unsupported("a BLOOM with apply_residual_connection_post_layernorm=true")
    _add_without_rotary(writer, c, c.seq_length, 4 * c.hidden_size, c.layer_norm_epsilon)


def _add_without_rotary(
    writer: GGUFWriter, c: AttentionConfig | BloomConfig, context_length: int, inner_size: int, eps: float
) -> None:
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(context_length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(inner_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_attention_heads if isinstance(c, BloomConfig) else c.num_key_value_heads)
    writer.add_layer_norm_eps(eps)


WRITERS: dict[str, tuple[str, Callable[[GGUFWriter, Any], None]]] = {
    "llama": ("llama", add_llama),
    "mistral": ("llama", add_llama),
    "mixtral": ("llama", add_mixtral),
    "qwen": ("qwen", _add_qwen),
    "qwen2": ("qwen2", add_qwen2),
    "qwen3": ("qwen3", add_qwen2),
    "qwen3_moe": ("qwen3moe", add_qwen3_moe),
    "qwen3_next": ("qwen3next", add_qwen3_next),
    "qwen3_5_text": ("qwen35", add_qwen35),
    "qwen3_5_moe_text": ("qwen35moe", add_qwen35_moe),
    "granite": ("granite", add_granite),
    "granitemoehybrid": ("granitehybrid", add_granite_hybrid),
    "falcon_h1": ("falcon-h1", add_falcon_h1),
    "kimi_linear": ("kimi-linear", add_kimi_linear),
    "mamba2": ("mamba2", add_mamba2),
    "nemotron_h": ("nemotron_h", add_nemotron_h),
    "gemma2": ("gemma2", add_gemma2),
    "gemma3_text": ("gemma3", add_gemma3),
    "phi3": ("phi3", add_phi3),
    "glm": ("chatglm", add_decoder),
    "glm4": ("glm4", add_decoder),
    "chatglm": ("chatglm", _add_chatglm),
    "deepseek_v2": ("deepseek2", _add_deepseek),
    "deepseek_v3": ("deepseek2", _add_deepseek),
    "gpt2": ("gpt2", _add_gpt2),
    "gpt_bigcode": ("starcoder", _add_starcoder),
    "mpt": ("mpt", _add_mpt),
    "bloom": ("bloom", _add_bloom),
    "lfm2": ("lfm2", add_lfm2),
    "lfm2_moe": ("lfm2moe", add_lfm2_moe),
}
"""llama.cpp's architecture, and the function that writes its keys, by model_type."""
