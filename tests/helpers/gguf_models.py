"""Small models of every architecture that can be read from GGUF, and the comparison of a file with transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM

from tests.helpers.builders import all_logits, engine_of
from tests.helpers.deepseek import SMALL as DEEPSEEK
from tests.helpers.deepseek import V2_GROUPS, V3_GROUPS, YARN
from tests.helpers.dense_families import LONGROPE
from tests.helpers.oracle import TOLERANCE, random_prompts, write_random

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 240,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GEMMA: dict[str, Any] = BASE | {"sliding_window": 9, "query_pre_attn_scalar": 16}
PHI3: dict[str, Any] = BASE | {"original_max_position_embeddings": 60}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3_SCALED = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
LATENT_SCALES = {"mscale": 0.707, "mscale_all_dim": 0.707}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", BASE),
    "qwen3_tied_wide_heads": ("Qwen3", BASE | {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3_biases": ("Qwen3", BASE | {"attention_bias": True}),
    "qwen3_yarn": ("Qwen3", BASE | {"rope_parameters": YARN}),
    "qwen3_moe": ("Qwen3Moe", BASE | EXPERTS),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 7}),
    "gemma3_scaled_cap": (
        "Gemma3",
        GEMMA | {"num_hidden_layers": 7, "rope_parameters": GEMMA3_SCALED, "final_logit_softcapping": 2.0},
    ),
    "gemma3_no_windows": ("Gemma3", GEMMA | {"layer_types": [FULL] * 3}),
    "phi3": ("Phi3", PHI3),
    "phi3_window_partial": ("Phi3", PHI3 | {"sliding_window": 20, "partial_rotary_factor": 0.75}),
    "phi3_longrope": ("Phi3", PHI3 | {"rope_scaling": LONGROPE}),
    "glm": ("Glm", BASE | {"attention_bias": True}),
    "glm4": ("Glm4", BASE),
    "glm4_biases": ("Glm4", BASE | {"attention_bias": True, "partial_rotary_factor": 0.25}),
    "deepseek_v2": ("DeepseekV2", DEEPSEEK),
    "deepseek_v2_no_q_lora": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek_v2_groups": ("DeepseekV2", DEEPSEEK | V2_GROUPS),
    "deepseek_v2_yarn": ("DeepseekV2", DEEPSEEK | {"rope_parameters": YARN | LATENT_SCALES}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK | V3_GROUPS),
    "deepseek_v3_one_group": ("DeepseekV3", DEEPSEEK | ONE_GROUP | {"norm_topk_prob": False}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 72}),
    "gpt2_inner_untied": (
        "GPT2LMHeadModel",
        {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 100, "tie_word_embeddings": False},
    ),
    "bloom": ("Bloom", {"vocab_size": 96, "hidden_size": 48, "n_layer": 2, "n_head": 6, "layer_norm_epsilon": 1e-3}),
}

LLAMA_LIKE: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "llama_biases": (LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": (LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama_wide_heads": (LlamaForCausalLM, {"head_dim": 80}),
    "mistral": (MistralForCausalLM, {"sliding_window": 7, "head_dim": 16}),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen2": (Qwen2ForCausalLM, {}),
}


def build(folder: Path, name: str, **changes: Any) -> Any:
    """Return transformers' model with random parameters, and write its checkpoint to the folder."""
    family, config = CASES[name]
    model_class = getattr(transformers, family if family.endswith("Model") else f"{family}ForCausalLM")
    config_class = model_class.config_class
    settings = {**config, "bos_token_id": 1, "eos_token_id": None, **changes}
    # the other implementations drop the soft cap
    return write_random(folder, model_class._from_config(config_class(**settings), attn_implementation="eager"))


def assert_equals_transformers(file: Path, reference: Any, tolerance: float = TOLERANCE) -> None:
    """Compare logits at every position, and greedy tokens."""
    engine = engine_of(file)
    prompts = random_prompts(96)
    for prompt in prompts:
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(all_logits(engine, prompt), expected, atol=tolerance, rtol=0)
