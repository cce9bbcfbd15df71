"""The table of architectures with recurrent layers: one row per architecture."""

import math
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.helpers.family import BASE, FULL, LEFT_OUT, NOT_SILU, THREE_KEYS, Family

CONV, LINEAR, MAMBA, ATTENTION = "conv", "linear_attention", "mamba", "attention"
LFM2: dict[str, Any] = {**BASE, "num_hidden_layers": 4, "block_multiple_of": 8, "tie_word_embeddings": True}
HUB = {  # the keys of LiquidAI's files
    "block_dim": 64,
    "conv_dim": 64,
    "conv_dim_out": 64,
    "num_heads": 4,
    "use_pos_enc": True,
    "block_use_swiglu": True,
    "block_ff_dim": 132,
    "intermediate_size": LEFT_OUT,
    "norm_eps": 1e-5,
    "full_attn_idxs": [1, 3],
    "tie_embedding": True,
    "tie_word_embeddings": LEFT_OUT,
}

MIXTURE = {
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}

DELTA: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
DELTA_VARIANTS: list[dict[str, Any]] = [
    {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]},  # the last layer is recurrent, and computes output rows alone
    {},  # one layer of four is attention
    {"layer_types": [FULL, LINEAR] * 2, "linear_num_value_heads": 6, "linear_value_head_dim": 40},
    {"layer_types": [LINEAR, FULL] * 2, "linear_conv_kernel_dim": 2, "linear_key_head_dim": 9, "rms_norm_eps": 1e-3},
]
CHUNKED = 5e-4
"""The tolerance for a model whose prompts transformers computes in chunks. Its chunks differ from its own recurrence, token
by token, by up to 2.2e-4 in these models, ours from that recurrence by up to 1.1e-4: a norm enlarges small outputs."""
REFUSED_DELTA = [
    THREE_KEYS,
    NOT_SILU,
    ({"attention_bias": True}, "attention_bias=True is not supported: only False, None"),
    ({"attn_output_gate": False}, "attn_output_gate=False is not supported: only True, None"),
    ({"linear_num_key_heads": 3}, "linear_num_value_heads=4 is not a multiple of linear_num_key_heads=3"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 keeps no earlier token"),
    ({"layer_types": [LINEAR, FULL]}, "is not a list of num_hidden_layers=4 types"),
    (
        {"layer_types": [FULL, "conv"] * 2},
        "layer_types has 'conv', which is not supported: only 'linear_attention', 'f",
    ),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' is not supported: only 'float32', None"),
]

MAMBA2: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
"""A layer has 128 channels: 8 heads of 16."""
REFUSED_MAMBA2 = [
    THREE_KEYS,
    NOT_SILU,
    ({"mamba_n_heads": 12}, "mamba_n_heads=12 of mamba_d_head=10 channels are not the 128 channels of mamba_expand"),
    ({"mamba_d_head": 8}, "mamba_n_heads=8 of mamba_d_head=8 channels are not the 128 channels of mamba_expand"),
    ({"mamba_n_groups": 3}, "mamba_n_heads=8 is not a multiple of mamba_n_groups=3"),
    ({"mamba_d_conv": 1}, "mamba_d_conv=1 keeps no earlier token"),
    ({"time_step_limit": [0.1]}, r"time_step_limit=\[0\.1\] is not two numbers from 0 on"),
    ({"time_step_limit": [0.2, 0.1]}, r"time_step_limit=\[0\.2, 0\.1\] is not two numbers from 0 on"),
]
NEMOTRON: dict[str, Any] = {
    **{key: value for key, value in BASE.items() if key != "num_hidden_layers"},
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
GRANITE: dict[str, Any] = {
    **MAMBA2,
    "num_local_experts": 0,
    "shared_intermediate_size": 88,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
FALCON_H1: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 5.5,
    "lm_head_multiplier": 0.4,
    "attention_in_multiplier": 0.8,
    "key_multiplier": 0.6,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.4, 0.25, 0.5, 0.8, 1.5],
    "ssm_out_multiplier": 0.7,
    "mlp_multipliers": [0.9, 0.6],
}

KIMI: dict[str, Any] = {
    **{key: value for key, value in BASE.items() if key != "max_position_embeddings"},
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "model_max_length": 128,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.446,
}
KIMI_HUB = {  # the keys of Moonshot AI's files
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3, 4],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 3,
    },
    "linear_head_dim": LEFT_OUT,
    "linear_num_heads": LEFT_OUT,
    "first_k_dense_replace": 2,
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
}
KDA_TWICE = {**KIMI_HUB["linear_attn_config"], "kda_layers": [1, 2, 3, 4]}  # type: ignore[dict-item]


def rename_dense_layers(file: Path) -> None:
    """Give dense layers of Kimi Linear the names of the hub's files. transformers writes the names of mixtures."""
    tensors = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name): t for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


HYBRID = {
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        sizes=GRANITE,
        variants=[
            {"layer_types": [MAMBA, MAMBA, ATTENTION, MAMBA]},
            {"layer_types": [MAMBA, ATTENTION] * 2, "num_local_experts": 4, "num_experts_per_tok": 2},
            {"layer_types": [ATTENTION, MAMBA] * 2, "position_embedding_type": "rope", "mamba_n_groups": 4},
            {"layer_types": [ATTENTION] * 4, "position_embedding_type": "rope", "tie_word_embeddings": True},
            {
                "layer_types": [MAMBA, ATTENTION] * 2,
                "mamba_n_heads": 3,
                "mamba_expand": 3,
                "mamba_d_state": 9,
                "mamba_proj_bias": True,
                "mamba_conv_bias": False,
                "attention_bias": True,
                "rms_norm_eps": 1e-3,
            },
            {"layer_types": [MAMBA, ATTENTION] * 2, "mamba_d_conv": 2, "time_step_limit": [0.5, 0.8]},
        ],
        read=[
            (
                {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "nope"},
                {"is_recurrent": (True, False) * 2, "has_rotary": False, "mamba.step_limits": (0.0, math.inf)},
            ),
            (
                {"layer_types": [LINEAR, FULL] * 2, "time_step_limit": [0.0, {"__float__": "Infinity"}]},
                {"is_recurrent": (True, False) * 2, "mamba.step_limits": (0.0, math.inf), "num_experts": 0},
            ),
        ],
        refused=[
            *[({**changes, "layer_types": [MAMBA, ATTENTION] * 2}, error) for changes, error in REFUSED_MAMBA2],
            ({"layer_types": [MAMBA, "conv"] * 2}, "layer_types has 'conv', which is not supported"),
            (
                {"layer_types": [LINEAR, FULL] * 2, "layers_block_type": [MAMBA] * 4},
                r"layers_block_type=\['mamba', .*'\] contradicts layer_types: leave one of them out",
            ),
            ({}, "layer_types=None is not a list of num_hidden_layers=4 types"),
            (
                {"layer_types": [MAMBA, ATTENTION] * 2, "num_local_experts": 2, "num_experts_per_tok": 3},
                "num_experts_per_tok=3 is more than num_local_experts=2",
            ),
            (
                {"layer_types": [MAMBA, ATTENTION] * 2, "position_embedding_type": "alibi"},
                "position_embedding_type='alibi' is not supported: only 'rope', 'nope', None",
            ),
        ],
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        config={"rms_norm_eps": LEFT_OUT},
        sizes={
            **{key: BASE[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")},
            **{"num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
        },
        variants=[
            {},
            {"n_groups": 1, "num_heads": 16, "head_dim": 8, "use_bias": True, "tie_word_embeddings": True},
            {"use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 1e-3, "n_groups": 4},
        ],
        read=[({"time_step_limit": [0.1, 0.2]}, {"context_length": 2**20, "mamba.step_limits": (0.1, 0.2)})],
        refused=[
            NOT_SILU,
            ({"head_dim": 8}, "num_heads=8 of head_dim=8 channels are not the 128 channels of expand"),
            ({"n_groups": 3}, "num_heads=8 is not a multiple of n_groups=3"),
            ({"conv_kernel": 1}, "conv_kernel=1 keeps no earlier token"),
        ],
    ),
    "bamba": Family(
        "BambaForCausalLM",
        sizes={**MAMBA2, "attn_layer_indices": [2]},
        variants=[
            {},
            {"attn_layer_indices": [0, 2], "mamba_n_groups": 2, "attention_bias": True, "mlp_bias": True},
            {"attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_conv": 3, "tie_word_embeddings": True},
        ],
        read=[({"attn_rotary_emb": 8}, {"is_recurrent": (True, True, False, True), "rotary.head_dim": 8})],
        refused=[
            *REFUSED_MAMBA2,
            ({"attn_layer_indices": [4]}, r"attn_layer_indices=\[4\] is not a list of layers from 0 to 3"),
        ],
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        sizes=FALCON_H1,
        variants=[
            {},
            {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2, "num_key_value_heads": 1},
            {"mamba_rms_norm": True, "mamba_n_groups": 3, "tie_word_embeddings": True, "mamba_d_conv": 3},
            {"mamba_rms_norm": True, "mamba_d_ssm": None, "mamba_n_heads": 4, "mamba_d_head": 32},
            {
                "attention_bias": True,
                "mlp_bias": True,
                "projectors_bias": True,
                "mamba_proj_bias": True,
                "mamba_conv_bias": False,
                "mlp_multipliers": None,
                "ssm_multipliers": None,
            },
        ],
        read=[
            (
                {"mamba_use_mlp": True, "attn_layer_indices": None, "projectors_bias": True},
                {"mamba.heads.num_heads": 6, "mamba.has_bias": False, "mamba.has_output_bias": True, "has_norm": False},
            ),
        ],
        refused=[
            THREE_KEYS,
            NOT_SILU,
            ({"mamba_d_head": 8}, "mamba_n_heads=6 of mamba_d_head=8 channels are not the 96 channels of mamba_d_ssm"),
            ({"mamba_use_mlp": False}, "mamba_use_mlp=False is not supported: only True, None"),
            ({"attn_layer_indices": [1]}, r"attn_layer_indices=\[1\] is not supported: only None"),
            ({"layer_types": ["hybrid", FULL, "hybrid"]}, "layer_types=.* is not supported: only "),
            ({"ssm_multipliers": [1.0, 2.0]}, r"ssm_multipliers=\[1\.0, 2\.0\] is not a list of 5 positive numbers"),
            ({"mlp_multipliers": [1, 0]}, r"mlp_multipliers=\[1, 0\] is not a list of 2 positive numbers"),
            ({"key_multiplier": 0}, "key_multiplier=0.0 is not a number from 1e-30"),
        ],
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        sizes=NEMOTRON,
        config={"num_hidden_layers": LEFT_OUT, "rms_norm_eps": LEFT_OUT},
        variants=[
            {"layers_block_type": [LINEAR, "mlp", FULL, LINEAR]},
            {"layers_block_type": [LINEAR, "moe", FULL, "moe", LINEAR, "mlp"]},
            {
                "layers_block_type": [FULL, "moe", LINEAR, "moe"],
                "moe_latent_size": 40,
                "n_group": 2,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "norm_topk_prob": False,
                "routed_scaling_factor": 2.5,
            },
            {"layers_block_type": [LINEAR, FULL], "mamba_num_heads": 5, "n_groups": 1, "tie_word_embeddings": True},
            {"layers_block_type": ["mlp", FULL, LINEAR, "mlp"], "mlp_bias": True, "mamba_head_dim": 40},
        ],
        read=[
            (
                {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "rms_norm_eps": 1e-5},
                {"is_recurrent": (True, False, False, True), "layer_kinds": (LINEAR, "mlp", FULL, LINEAR)},
            ),
            (
                {"layers_block_type": ["mamba", "attention"], "hybrid_override_pattern": "M*"},
                {"is_recurrent": (True, False), "mixtures": None},
            ),
        ],
        refused=[
            ({"layers_block_type": [LINEAR, FULL], "num_key_value_heads": 3}, THREE_KEYS[1]),
            ({"layers_block_type": [LINEAR, FULL], "mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported"),
            ({"layers_block_type": [LINEAR, FULL], "n_groups": 3}, "mamba_num_heads=8 is not a multiple of n_groups=3"),
            ({"layers_block_type": [LINEAR, FULL], "conv_kernel": 1}, "conv_kernel=1 keeps no earlier token"),
            (
                {"hybrid_override_pattern": "M-", "layers_block_type": [MAMBA, ATTENTION]},
                "hybrid_override_pattern='M-' contradicts layers_block_type: leave one of them out",
            ),
            ({"hybrid_override_pattern": "M*X"}, "a layer is 'X', which is not supported: only 'linear_attention'"),
            ({"hybrid_override_pattern": "M*", "num_hidden_layers": 3}, "num_hidden_layers=3 contradicts its 2 layer"),
            ({}, "layers_block_type=None is not a list of layer types"),
            ({"layers_block_type": ["moe", FULL], "num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than"),
        ],
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        tolerance=CHUNKED,
        sizes={**DELTA, **EXPERTS},
        variants=[
            *DELTA_VARIANTS,
            {"decoder_sparse_step": 2, "norm_topk_prob": False, "layer_types": [LINEAR, FULL] * 2},
            {"mlp_only_layers": [0], "num_experts_per_tok": 1, "layer_types": [LINEAR, FULL] * 2},
        ],
        read=[
            (
                {"full_attention_interval": 2, "partial_rotary_factor": 0.25, "rope_parameters": LEFT_OUT},
                {"is_recurrent": (True, False) * 2, "rotary.head_dim": 4, "mixture.norm_topk_prob": True},
            ),
        ],
        refused=[*REFUSED_DELTA, ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_experts=4")],
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        tolerance=CHUNKED,
        sizes=DELTA,
        variants=[*DELTA_VARIANTS, {"tie_word_embeddings": True, "layer_types": [LINEAR, FULL] * 2}],
        read=[
            (
                {"mtp_num_hidden_layers": 1, "output_gate_type": "swish", "mlp_only_layers": []},
                {"is_recurrent": (True, True, True, False), "num_taps": 4},
            ),
        ],
        refused=REFUSED_DELTA,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        tolerance=CHUNKED,
        sizes={**{key: value for key, value in DELTA.items() if key != "intermediate_size"}, **EXPERTS},
        variants=[*DELTA_VARIANTS[:2], {"num_experts_per_tok": 1, "layer_types": [LINEAR, FULL] * 2}],
        read=[({}, {"mixture.norm_topk_prob": True, "mixture.sparse_layers": (True,) * 4})],
        refused=[*REFUSED_DELTA, ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported: only True, None")],
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        sizes=KIMI,
        variants=[
            {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]},
            {"num_hidden_layers": 5},  # the last layer is attention
            {
                "layer_types": [FULL, LINEAR] * 2,
                "linear_num_heads": 3,
                "linear_head_dim": 40,
                "linear_conv_kernel_dim": 2,
                "mlp_layer_types": ["sparse", "dense", "dense", "sparse"],
                "q_lora_rank": 20,
                "attention_bias": True,
                "rms_norm_eps": 1e-3,
            },
            {
                "layer_types": [LINEAR, FULL] * 2,
                "linear_head_dim": 9,
                "num_expert_group": 2,
                "topk_group": 1,
                "moe_renormalize": False,
                "num_shared_experts": 2,
                "routed_scaling_factor": 1.5,
            },
        ],
        read=[
            (
                KIMI_HUB,
                {
                    "is_recurrent": (True, False, True, True),
                    "is_sparse": (False, False, True, True),
                    "num_taps": 3,
                    "context_length": 128,
                    "routing.num_experts_per_tok": 2,
                },
            ),
        ],
        refused=[
            NOT_SILU,
            ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported: only 4, None"),
            ({"mla_use_nope": False}, "mla_use_nope=False is not supported: only True, None"),
            ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax' is not supported"),
            ({"routed_scaling_factor": LEFT_OUT}, "routed_scaling_factor is missing"),
            ({"num_experts_per_token": 5}, "num_experts_per_token=5 is more than the 4 experts of topk_group=1"),
            ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 keeps no earlier token"),
            ({"layer_types": [LINEAR, FULL]}, "is not a list of num_hidden_layers=4 types"),
            ({"mlp_layer_types": ["dense"] * 3}, "is not 4 times 'dense' or 'sparse'"),
            ({**KIMI_HUB, "linear_attn_config": KDA_TWICE}, "are not the layers from 1 to num_hidden_layers=4, each"),
        ],
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        sizes=LFM2,
        config={"rms_norm_eps": LEFT_OUT},
        variants=[
            {"layer_types": [CONV, FULL, CONV, CONV]},  # the last layer is recurrent, and computes output rows alone
            {"layer_types": [FULL, CONV, FULL], "num_hidden_layers": 3, "conv_bias": True, "conv_L_cache": 4},
            {"full_attn_idxs": [2], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
            {"layer_types": [CONV, FULL] * 2, "conv_L_cache": 2, "block_ffn_dim_multiplier": 1.3, "norm_eps": 1e-3},
            {"layer_types": [FULL] * 4, "rope_theta": 5e4},
            # more taps than most steps have tokens
            {"layer_types": [FULL, CONV, CONV, CONV], "conv_L_cache": 9, "num_key_value_heads": 1},
        ],
        read=[
            (
                HUB,
                {"intermediate_size": 88, "is_recurrent": (True, False, True, False), "tie_word_embeddings": True},
            ),
            ({"layer_types": [CONV, FULL] * 2, "full_attn_idxs": [1, 3]}, {"is_recurrent": (True, False) * 2}),
            ({}, {"is_recurrent": (False,) * 4, "rotary.theta": 1e6, "num_taps": 3}),
        ],
        refused=[
            THREE_KEYS,
            ({"conv_dim": 32}, "conv_dim=32 is not supported: only 64, None"),
            ({"layer_types": [CONV, FULL]}, "is not a list of num_hidden_layers=4 types"),
            (
                {"layer_types": [CONV, "mamba"] * 2},
                "layer_types has 'mamba', which is not supported: only 'conv', 'full",
            ),
            ({"layer_types": [CONV, FULL] * 2, "full_attn_idxs": [0]}, r"full_attn_idxs=\[0\] contradicts layer_types"),
            ({"full_attn_idxs": [4]}, r"full_attn_idxs=\[4\] is not a list of layers from 0 to 3"),
            ({"full_attn_idxs": 2}, "full_attn_idxs=2 is not a list of layers"),
            ({"conv_L_cache": 1}, "conv_L_cache=1 keeps no earlier token"),
            ({"num_attention_heads": 64, "num_key_value_heads": 64}, "head_dim=1 is odd"),
        ],
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        sizes={**{key: value for key, value in LFM2.items() if not key.startswith("block_")}, **MIXTURE},
        config={"rms_norm_eps": LEFT_OUT, "layer_types": [CONV, FULL] * 2},
        variants=[
            {"layer_types": [CONV, FULL, CONV, CONV]},
            {"layer_types": [FULL, CONV] * 2, "use_expert_bias": False, "routed_scaling_factor": 1.7},
            {"layer_types": [CONV, FULL] * 2, "norm_topk_prob": False, "num_experts_per_tok": 1, "num_dense_layers": 0},
        ],
        read=[
            (
                {"tie_embedding": False, "tie_word_embeddings": LEFT_OUT, "theta": LEFT_OUT},
                {"intermediate_size": 88, "layer_kinds": (False, True, True, True), "tie_word_embeddings": False},
            ),
        ],
        refused=[
            ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_experts=4"),
            ({"layer_types": [CONV, FULL]}, "is not a list of num_hidden_layers=4 types"),
        ],
    ),
}
