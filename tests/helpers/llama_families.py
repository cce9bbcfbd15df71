"""The table of dense architectures that change parts of Llama's decoder: one row per architecture."""

from tests.helpers.dense_families import DYNAMIC, LONGROPE
from tests.helpers.family import BASE, FULL, LEFT_OUT, NOT_SILU, SLIDING, YARN, Family

CHANGED_LLAMAS = {
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        sizes={**BASE, "head_dim": 16},
        variants=[
            {"rope_parameters": {**DYNAMIC, "rope_theta": 100.0, "alpha": 50.0}},
            {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "num_key_value_heads": 1},
            {"rope_parameters": {**DYNAMIC, "rope_theta": 10000.0}, "max_position_embeddings": 32, "head_dim": 12},
        ],
        read=[
            (  # as on the hub
                {
                    "rope_scaling": {"type": "dynamic", "alpha": 16.0, "factor": 1.0, "beta_fast": 32},
                    "use_qk_norm": True,
                },
                {"rotary.type": "default", "rotary.theta": 1e4 * 16 ** (16 / 14), "context_length": 128},
            )
        ],
        refused=[
            NOT_SILU,
            ({"use_cla": True}, "use_cla=True is not supported: only False, None"),
            ({"rope_scaling": {"type": "linear", "alpha": 2.0}}, "type='linear' is not supported: only 'dynamic'"),
            ({"rope_scaling": {"type": "dynamic", "alpha": 0.0}}, r"alpha=0\.0 is not a number from 1e-30"),
        ],
    ),
    "hyperclovax": Family(
        "HyperCLOVAXForCausalLM",
        sizes={**BASE, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
        variants=[
            {"logits_scaling": 0.25},
            {"use_post_norm": False, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            {"attention_multiplier": None, "head_dim": 24, "num_key_value_heads": 1},
        ],
        refused=[
            NOT_SILU,
            ({"use_post_norm": 1}, "use_post_norm=1 is not of type bool"),
            ({"logits_scaling": 0}, r"logits_scaling=0\.0 is not a number from 1e-30"),
        ],
    ),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM",
        sizes={
            **BASE,
            "num_key_value_heads": 4,
            **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "scale_emb": 3},
        },
        variants=[
            {"dim_model_base": 16},
            {"scale_depth": None, "dim_model_base": None, "v_head_dim": 20, "q_lora_rank": None},
            {"attention_bias": True, "tie_word_embeddings": False, "rope_parameters": {**YARN, "rope_theta": 1e4}},
            {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 128, "rope_theta": 1e4}},
        ],
        read=[
            (
                {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 32}, "v_head_dim": LEFT_OUT},
                {"capabilities.long_rope_threshold": 32, "tie_word_embeddings": True, "v_head_dim": 16},
            )
        ],
        refused=[
            NOT_SILU,
            ({"mlp_bias": True}, "mlp_bias=True is not supported: only False"),
            ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4"),
            ({"scale_depth": 0}, r"scale_depth=0\.0 is not a number from 1e-30"),
        ],
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        sizes={**BASE, "head_dim": 16},
        variants=[
            {"sliding_window": 6},
            {"layer_types": [SLIDING, FULL], "sliding_window": 9, "num_key_value_heads": 1},
            {"sliding_window": 9, "layer_types": [FULL] * 2, "tie_word_embeddings": True},
        ],
        read=[({}, {"windows": (4096, 4096)}), ({"sliding_window": None}, {"windows": (None, None)})],
        refused=[NOT_SILU, ({"layer_types": [FULL]}, "layer_types=.* is not 2 times 'sliding_attention' or 'full_att")],
    ),
}
