"""The table of architectures with recurrent layers: one row per architecture."""

from typing import Any

from tests.helpers.family import BASE, FULL, LEFT_OUT, THREE_KEYS, Family

CONV = "conv"
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

HYBRID = {
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
                {"intermediate_size": 88, "attends": (False, True, False, True), "tie_word_embeddings": True},
            ),
            ({"layer_types": [CONV, FULL] * 2, "full_attn_idxs": [1, 3]}, {"attends": (False, True) * 2}),
            ({}, {"attends": (True,) * 4, "rotary.theta": 1e6, "num_taps": 3}),
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
