"""The table of architectures whose layers have heads of different shapes and share keys and values."""

from typing import Any

from tests.helpers.family import BASE, FULL, LEFT_OUT, SLIDING, Family

SIZES: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "attn_implementation": "eager",
}
OF_GEMMA4 = ("global_head_dim",)
NO_INPUTS = {"hidden_size_per_layer_input": 0}
INPUTS = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 96}
SHARED = {**INPUTS, "num_kv_shared_layers": 2}  # transformers runs shared keys and values only with inputs per layer
MIXTURE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
LAYERS_OF_GEMMA4: list[tuple[dict[str, Any], str]] = [
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4 is not from 0 to a number that leaves one layer of each typ"),
    ({"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1 is not from 0 to a number that leaves one layer of each"),
    ({"num_kv_shared_layers": 9}, "num_kv_shared_layers=9 is not from 0 to a number that leaves one layer of each ty"),
    ({"per_layer_config": [1]}, r"per_layer_config=\[1\] is not an object of settings by layer"),
    ({"per_layer_config": {"5": {}}}, "per_layer_config: '5' is not the settings of a layer"),
    ({"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config: 1 has sliding_window, which is not supp"),
    ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config gives layers of one type different values of he"),
    ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "num_attention_heads=4 is not a multiple of num_key_va"),
    ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input=-1 is not a number above 0"),
    ({**INPUTS, "vocab_size_per_layer_input": 95}, "vocab_size_per_layer_input=95 is less than vocab_size"),
    ({**MIXTURE, "top_k_experts": 7}, "top_k_experts=7 is more than num_experts=6"),
    ({"enable_moe_block": True}, "num_experts is missing"),
    ({"global_head_dim": 15}, "head_dim=15 is odd, but rotary embedding turns pairs of channels"),
    ({"layer_types": [FULL]}, "layer_types=.* is not 5 times 'sliding_attention' or 'full_attention'"),
]

GEMMAS = {
    "gemma4": Family(
        "Gemma4ForCausalLM",
        model_type="gemma4_text",
        sizes={**SIZES, **NO_INPUTS},
        variants=[
            {**SHARED, **MIXTURE, "final_logit_softcapping": 2.0},
            {},
            {**MIXTURE, "attention_k_eq_v": True, "num_experts": 3, "top_k_experts": 3},
            {**SHARED, "head_dim": 32, "num_global_key_value_heads": 1},
            {**INPUTS, "hidden_size_per_layer_input": 7, "vocab_size_per_layer_input": 100},
            {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "attention_bias": True},
            {**SHARED, "use_double_wide_mlp": True, "global_head_dim": 16, "tie_word_embeddings": False},
            {"num_hidden_layers": 7, "layer_types": None, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
            {"num_hidden_layers": 2, "layer_types": [FULL, FULL], **INPUTS, "num_kv_shared_layers": 1},
            {
                "rope_parameters": {
                    FULL: {"rope_type": "proportional", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
                    SLIDING: {"rope_type": "default", "rope_theta": 300.0},
                }
            },
        ],
        read=[
            ({}, {"rotary.share": 0.25, "rotary.theta": 1e6, "sliding_rotary.theta": 1e4, "rotary.head_dim": 32}),
            ({"per_layer_config": {"01": {"head_dim": 32}, "4": {"head_dim": 32}}}, {"rotary.head_dim": 32}),
            ({"use_bidirectional_attention": "vision", "num_experts": 8}, {"shared_caches": {}, "mixture": None}),
            (SHARED, {"shared_caches": {3: 2, 4: 1}}),
        ],
        refused=[
            ({"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported: only 'gelu_pytorch_tanh'"),
            ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
            *LAYERS_OF_GEMMA4,
            (
                {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
                r"partial_rotary_factor=1\.5 is more than 1",
            ),
            (
                {"rope_parameters": {FULL: {"rope_type": "proportional", "factor": 8.0}}},
                r"factor=8\.0 is not supported: only None, 1",
            ),
        ],
    ),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        model_type="gemma3n_text",
        sizes={
            **{key: value for key, value in SIZES.items() if key not in OF_GEMMA4},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 90, "laurel_rank": 5},
            **{"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.0, 0.5, 0.95, 0.0]},
        },
        variants=[
            {},
            {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None, "altup_correct_scale": False},
            {"altup_num_inputs": 3, "altup_active_idx": 1, "final_logit_softcapping": 2.0, "attention_bias": True},
            {"intermediate_size": [40, 48, 40, 56, 40], "num_key_value_heads": 1, "tie_word_embeddings": False},
            {"vocab_size_per_layer_input": 100, "final_logit_softcapping": 2.0, "num_attention_heads": 2},
            {"vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0, "intermediate_size": [40, 48, 40, 56, 40]}
            | {"altup_active_idx": 2, "activation_sparsity_pattern": [0.0] * 5},
        ],
        refused=[
            ({"altup_active_idx": 4}, "altup_num_inputs=4 and altup_active_idx=4 are not at most 8 streams"),
            (
                {"activation_sparsity_pattern": [0.5]},
                r"activation_sparsity_pattern=\[0\.5\] is not a list of 5 numbers",
            ),
            ({"intermediate_size": [40]}, r"intermediate_size=\[40\] is not a list of num_hidden_layers=5 numbers"),
        ],
    ),
    "gemma4_unified": Family(
        "Gemma4UnifiedForCausalLM",
        model_type="gemma4_unified_text",
        sizes=SIZES,
        variants=[{"attention_k_eq_v": True}, {"final_logit_softcapping": 2.0, "attention_bias": True}],
        read=[({"sliding_window": LEFT_OUT}, {"windows": (1024, None, 1024, 1024, None), "layer_inputs": None})],
        refused=[({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported")],
    ),
}
