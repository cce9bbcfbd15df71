"""The table of architectures with recurrent layers: one row per architecture."""

from typing import Any

from tests.helpers.family import BASE, FULL, LEFT_OUT, NOT_SILU, THREE_KEYS, Family

CONV, LINEAR = "conv", "linear_attention"
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
    ({"layer_types": [LINEAR] * 4}, "all layers are 'linear_attention': at least one layer must be 'full_attention'"),
    (
        {"layer_types": [FULL, "conv"] * 2},
        "layer_types has 'conv', which is not supported: only 'linear_attention', 'f",
    ),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' is not supported: only 'float32', None"),
]

HYBRID = {
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
            ({"layer_types": [CONV] * 4}, "all layers are 'conv': at least one layer must be 'full_attention'"),
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
