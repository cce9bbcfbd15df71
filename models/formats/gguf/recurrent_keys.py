"""Write the config of Granite and of models with recurrent layers as GGUF metadata. The inverse of recurrent_config.py."""

from dataclasses import replace
from math import inf
from typing import Any

from gguf import GGUFWriter
from gguf.constants import ExpertGatingFuncType

from models.families.falcon_h1_config import FalconH1Config
from models.families.granite import GraniteConfig, Multipliers
from models.families.granite_hybrid import GraniteHybridConfig
from models.families.kimi_linear import KimiLinearConfig
from models.families.lfm2 import Lfm2Config
from models.families.lfm2_moe import Lfm2MoeConfig
from models.families.mamba2 import MOST_TOKENS, Mamba2LMConfig
from models.families.nemotron_h import MIXTURE, MLP, Mixtures, NemotronHConfig
from models.families.qwen3_next_config import HybridConfig, HybridMoeConfig
from models.formats.gguf.decoder_keys import add_decoder, unsupported
from models.layers.layer_types import FULL, LINEAR
from models.layers.mamba2 import Mamba2Config

TEXT_SECTIONS = [11, 11, 10, 0]
"""The sections of Qwen3.5's rotary embedding. llama.cpp requires the key. They have no effect on text."""


def add_lfm2(writer: GGUFWriter, c: Lfm2Config) -> None:
    if c.conv_bias:
        raise unsupported("an LFM2 with conv_bias=true")
    add_decoder(writer, c)
    writer.add_shortconv_l_cache(c.num_taps)


def add_lfm2_moe(writer: GGUFWriter, c: Lfm2MoeConfig) -> None:
    if not c.norm_topk_prob or c.routed_scaling_factor != 1:
        raise unsupported("an LFM2-MoE with norm_topk_prob=false or routed_scaling_factor other than 1")
    add_lfm2(writer, c)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_leading_dense_block_count(c.num_dense_layers)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _check_kinds(is_recurrent: tuple[bool, ...]) -> None:
    """Raise UserError unless some layers are recurrent and some have attention: llama.cpp aborts without one kind."""
    if len({*is_recurrent}) < 2:
        raise unsupported("a model without recurrent layers, or without layers that have attention,")


def _add_delta(writer: GGUFWriter, c: HybridConfig) -> None:
    """Write the keys of layers with Gated DeltaNet. llama.cpp derives the attention layers from an interval."""
    _check_kinds(c.recurrent_layers)
    interval, heads = 1 + c.recurrent_layers.index(False), c.heads
    if any(is_recurrent != bool(i % interval) for i, is_recurrent in enumerate(c.recurrent_layers, 1)):
        raise unsupported("layer_types without full_attention in every n-th layer")
    if heads.key_channels != heads.value_channels:
        raise unsupported("a linear_value_head_dim other than linear_key_head_dim")
    add_decoder(writer, c)
    writer.add_ssm_conv_kernel(c.num_taps)
    writer.add_ssm_state_size(heads.key_channels)
    writer.add_ssm_group_count(heads.num_key_heads)
    writer.add_ssm_time_step_rank(heads.num_value_heads)
    writer.add_ssm_inner_size(heads.value_size)
    writer.add_full_attention_interval(interval)


def _add_delta_experts(writer: GGUFWriter, c: HybridMoeConfig) -> None:
    writer.add_expert_count(c.mixture.num_experts)
    writer.add_expert_used_count(c.mixture.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.mixture.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)


def add_qwen35(writer: GGUFWriter, c: HybridConfig) -> None:
    _add_delta(writer, c)
    writer.add_rope_dimension_sections(TEXT_SECTIONS)


def add_qwen35_moe(writer: GGUFWriter, c: HybridMoeConfig) -> None:
    add_qwen35(writer, c)
    _add_delta_experts(writer, c)


def add_qwen3_next(writer: GGUFWriter, c: HybridMoeConfig) -> None:
    if not c.mixture.norm_topk_prob or not all(c.layer_kinds):
        raise unsupported("a Qwen3-Next with norm_topk_prob=false or layers without experts")
    _add_delta(writer, c)
    _add_delta_experts(writer, c)


def _add_multipliers(writer: GGUFWriter, factors: Multipliers) -> None:
    writer.add_attention_scale(factors.attention)
    writer.add_embedding_scale(factors.embedding)
    writer.add_residual_scale(factors.residual)
    writer.add_logit_scale(factors.logits_divisor)


def add_granite(writer: GGUFWriter, c: GraniteConfig) -> None:
    add_decoder(writer, c)
    _add_multipliers(writer, c.multipliers)


def add_granite_hybrid(writer: GGUFWriter, c: GraniteHybridConfig) -> None:
    """Write the keys of Granite 4, as an architecture of its own only if it has recurrent layers."""
    is_hybrid = any(c.recurrent_layers)
    if not is_hybrid and (c.num_experts or not c.has_rotary):
        raise unsupported("a Granite 4 without recurrent layers, but with experts or position_embedding_type=nope,")
    if is_hybrid:
        _check_kinds(c.recurrent_layers)
    inner_size = c.intermediate_size if c.num_experts else c.shared_intermediate_size
    rotary = c.rotary if c.has_rotary else replace(c.rotary, max_position_embeddings=MOST_TOKENS)
    add_decoder(writer, replace(c, intermediate_size=inner_size, rotary=rotary))
    _add_multipliers(writer, c.multipliers)
    writer.add_rope_scaling_finetuned(c.has_rotary)
    if not is_hybrid:
        return
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_shared_feed_forward_length(c.shared_intermediate_size)
    _add_mamba2_layers(writer, c.mamba)


def _add_mamba2_layers(writer: GGUFWriter, c: Mamba2Config) -> None:
    if c.has_bias or not c.has_conv_bias or c.step_limits != (0.0, inf):
        features = "with a bias of in_proj and out_proj, without a bias of conv1d, or with time_step_limit"
        raise unsupported(f"a Mamba-2 layer {features},")
    writer.add_ssm_conv_kernel(c.num_taps)
    writer.add_ssm_state_size(c.heads.state_channels)
    writer.add_ssm_group_count(c.heads.num_groups)
    writer.add_ssm_inner_size(c.heads.size)
    writer.add_ssm_time_step_rank(c.heads.num_heads)


def add_mamba2(writer: GGUFWriter, c: Mamba2LMConfig) -> None:
    """Write the keys of Mamba-2. llama.cpp requires two keys that have no effect."""
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    _add_mamba2_layers(writer, c.mamba)


def add_nemotron_h(writer: GGUFWriter, c: NemotronHConfig) -> None:
    """Write the keys of Nemotron-H. llama.cpp derives the type of a layer from its key heads and its inner size."""
    _check_kinds(tuple(kind == LINEAR for kind in c.layer_types if kind in (LINEAR, FULL)))
    mixtures = c.mixtures
    if mixtures is not None and (MLP in c.layer_types or c.mlp_bias):
        raise unsupported("a Nemotron-H with mixtures of experts, and with dense layers or mlp_bias=true,")
    inner_size = c.intermediate_size if mixtures is None else mixtures.intermediate_size
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(MOST_TOKENS)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_layer_norm_eps(c.rms_norm_eps)  # llama.cpp requires this key too
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv([c.num_key_value_heads if kind == FULL else 0 for kind in c.layer_types])
    writer.add_feed_forward_length([inner_size if kind in (MLP, MIXTURE) else 0 for kind in c.layer_types])
    writer.add_rope_scaling_finetuned(False)  # nothing is rotated
    _add_mamba2_layers(writer, c.mamba)
    if mixtures is not None:
        _add_nemotron_experts(writer, mixtures)


def _add_nemotron_experts(writer: GGUFWriter, c: Mixtures) -> None:
    writer.add_expert_count(c.routing.num_experts)
    writer.add_expert_used_count(c.routing.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.intermediate_size)
    writer.add_expert_shared_feed_forward_length(c.shared_intermediate_size)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_norm(c.routing.norm_topk_prob)
    writer.add_expert_weights_scale(c.routing.scaling_factor)
    writer.add_expert_group_count(c.routing.n_group)
    writer.add_expert_group_used_count(c.routing.topk_group)
    if c.latent_size is not None:
        writer.add_moe_latent_size(c.latent_size)


def add_falcon_h1(writer: GGUFWriter, c: FalconH1Config) -> None:
    """Write the keys of Falcon-H1. The weights contain its factors."""
    if c.attention_bias or c.mlp_bias or c.mamba.has_output_bias:
        raise unsupported("a Falcon-H1 with biases of attention_bias, mlp_bias or projectors_bias")
    if c.has_norm and c.norm_before_gate:
        raise unsupported("a Falcon-H1 with mamba_rms_norm=true and mamba_norm_before_gate=true")
    if c.tie_word_embeddings and c.multipliers.embedding != c.multipliers.logits:
        raise unsupported("a Falcon-H1 with a tied head and embedding_multiplier other than lm_head_multiplier")
    add_decoder(writer, c)
    _add_mamba2_layers(writer, c.mamba)


def add_kimi_linear(writer: GGUFWriter, c: KimiLinearConfig) -> None:
    """Write the keys of Kimi Linear. Attention reads one latent head, so key and value lengths are its channels."""
    _check_kinds(c.recurrent_layers)
    routing, num_dense = c.routing, c.is_sparse.index(True) if any(c.is_sparse) else c.num_hidden_layers
    if c.num_delta_heads != c.num_attention_heads or c.attention_bias or not all(c.is_sparse[num_dense:]):
        features = (
            "with linear heads other than num_attention_heads, attention_bias=true or dense layers after mixtures"
        )
        raise unsupported(f"a Kimi Linear {features},")
    if routing.n_group > 1 or not routing.norm_topk_prob:
        raise unsupported("a Kimi Linear with groups of experts or moe_renormalize=false")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_tokens)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv([0 if is_recurrent else 1 for is_recurrent in c.recurrent_layers])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_ssm_conv_kernel(c.num_taps)
    writer.add_kda_head_dim(c.delta_channels)
    if c.q_lora_rank is not None:
        writer.add_q_lora_rank(c.q_lora_rank)
    writer.add_kv_lora_rank(c.kv_lora_rank)
    writer.add_rope_dimension_count(c.qk_rope_head_dim)
    writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    writer.add_value_length(c.hidden_size // c.num_attention_heads)  # without effect
    writer.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
    writer.add_value_length_mla(c.v_head_dim)
    writer.add_leading_dense_block_count(num_dense)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_count(routing.num_experts)
    writer.add_expert_used_count(routing.num_experts_per_tok)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_used_count(routing.topk_group)
    writer.add_expert_weights_scale(routing.scaling_factor)


def recurrent_architecture(config: Any) -> str | None:
    """Return llama.cpp's architecture of a model whose model_type has several. None: its model_type has one."""
    if isinstance(config, GraniteHybridConfig) and not any(config.recurrent_layers):
        return "granite"
    return "nemotron_h_moe" if isinstance(config, NemotronHConfig) and config.mixtures is not None else None
