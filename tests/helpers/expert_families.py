"""The table of mixtures of experts: one row per architecture."""

from tests.helpers.deepseek import SMALL as DEEPSEEK
from tests.helpers.dense_families import GROWING
from tests.helpers.family import BASE, FULL, NOT_SILU, SLIDING, YARN, Family

GRANITE = {
    **BASE,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LONG = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0]
LONGROPE = {
    **{"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5], "long_factor": LONG},
    **{"short_mscale": 1.2, "long_mscale": 1.3, "rope_theta": 1e4, "original_max_position_embeddings": 60},
}
MISTRAL4 = DEEPSEEK | {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}

EXPERTS = {
    "afmoe": Family(
        "AfmoeForCausalLM",
        sizes={
            **BASE,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
        },
        variants=[
            {"sliding_window": 7, "global_attn_every_n_layers": 3, "mup_enabled": True, "route_scale": 2.5},
            {
                "layer_types": [FULL, SLIDING, SLIDING],
                "sliding_window": 9,
                "num_dense_layers": 2,
                "attention_bias": True,
            },
            {"num_dense_layers": 0, "num_shared_experts": 1, "tie_word_embeddings": True, "num_key_value_heads": 1},
            {"num_hidden_layers": 5, "sliding_window": 7, "mup_enabled": True, "score_func": "sigmoid"},
        ],
        read=[({}, {"windows": (1024,) * 3, "layer_kinds": (False, True, True)})],
        refused=[
            NOT_SILU,
            ({"score_func": "softmax"}, "score_func='softmax' is not supported: only 'sigmoid'"),
            ({"n_group": 2}, "n_group=2 is not supported: only 1"),
            ({"layer_types": [FULL]}, "layer_types=.* is not 3 times 'sliding_attention' or 'full_att"),
        ],
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        sizes={
            **BASE,
            "head_dim": 16,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "sliding_window": None,
        },
        variants=[
            {"first_k_dense_replace": 1},
            {"n_shared_experts": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
            {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "tie_word_embeddings": True},
            {"attention_bias": True, "sliding_window": 6, "max_window_layers": 1},
        ],
        read=[({"sliding_window": 8, "max_window_layers": 2}, {"windows": (None, None, 8), "use_qk_norm": True})],
        refused=[NOT_SILU],
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        sizes={
            **BASE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "routed_scaling_factor": 1.0,
        },
        variants=[
            {"sliding_window": 6, "sliding_window_pattern": 2},
            {
                "mlp_layer_types": ["sparse", "dense", "sparse"],
                "layer_types": [FULL, SLIDING, FULL],
                "sliding_window": 9,
            },
            {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "num_shared_experts": 2, "norm_topk_prob": False},
            {"sliding_window": 9, "layer_types": [FULL] * 3, "first_k_dense_replace": 3, "tie_word_embeddings": True},
            {"routed_scaling_factor": 2.5, "num_key_value_heads": 1},
        ],
        read=[({"num_nextn_predict_layers": 1, "scoring_func": "sigmoid"}, {"layer_kinds": (False, True, True)})],
        refused=[
            NOT_SILU,
            ({"mlp_layer_types": ["dense"]}, r"mlp_layer_types=\['dense'\] is not 3 times 'dense' or 'sparse'"),
            ({"mlp_layer_types": [1, 2, 3]}, r"mlp_layer_types=\[1, 2, 3\] is not 3 times 'dense' or 'sparse'"),
            ({"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
            ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than the 6 experts of topk_group=1 groups"),
        ],
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        sizes={
            **BASE,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": GPT_OSS_ROPE,
        },
        variants=[
            {},
            {
                **{"layer_types": [FULL, SLIDING], "num_experts_per_tok": 6, "tie_word_embeddings": True},
                "intermediate_size": 64,  # down_proj is square, as in the published models
            },
            {"attention_bias": False, "swiglu_limit": 0.1, "swiglu_alpha": 1.2, "num_key_value_heads": 1},
        ],
        read=[({"initial_context_length": 4096, "experts_per_token": 2}, {"swiglu_limit": 7.0})],
        refused=[
            NOT_SILU,
            ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_local_experts=6"),
            ({"rope_parameters": None}, "rope_parameters is missing"),
            ({"layer_types": ["chunked_attention"] * 2}, "is not 2 times 'sliding_attention' or 'full_attention'"),
            ({"swiglu_limit": -1.0}, "swiglu_limit=-1.0 is not a number from 1e-30"),
        ],
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        sizes=GRANITE,
        variants=[{}, {"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 1}],
        refused=[NOT_SILU, ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_local_experts=4")],
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        sizes=GRANITE,
        variants=[{"shared_intermediate_size": 40}, {}],
        refused=[NOT_SILU, ({"shared_intermediate_size": -1}, "shared_intermediate_size=-1 is not a number above 0")],
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        sizes={**BASE, "head_dim": 16, "num_experts": 5, "moe_topk": 2, "intermediate_size": 40},
        variants=[
            {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 1e4, "alpha": 1000.0}},
            {"moe_topk": [1, 5], "attention_bias": True, "tie_word_embeddings": True},
            {"num_experts": 1, "moe_topk": 1, "num_key_value_heads": 1},
        ],
        read=[
            (
                {
                    "num_experts": [3, 5],
                    "moe_topk": [3, 1],
                    "moe_intermediate_size": [40, 40],
                    "num_shared_expert": [1, 1],
                },
                {"layer_kinds": ((3, 3), (5, 1))},
            )
        ],
        refused=[
            NOT_SILU,
            ({"moe_topk": 6}, "moe_topk=6 is more than num_experts=5 in layer 0"),
            ({"num_experts": [5, 1]}, "moe_topk=2 is more than num_experts=1 in layer 1"),
            ({"moe_topk": [1]}, r"moe_topk=\[1\] is not a list of num_hidden_layers=2 numbers"),
            ({"moe_topk": [1, "2"]}, "moe_topk='2' is not of type int"),
            ({"num_shared_expert": 2}, "num_shared_expert=2 is not supported: only None, 1"),
            ({"moe_intermediate_size": [40, 32]}, r"moe_intermediate_size=\[40, 32\] is not supported: only None, 40"),
        ],
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        sizes={**BASE, "num_experts": 6, "num_experts_per_tok": 2},
        variants=[
            {},
            {"clip_qkv": 0.5, "norm_topk_prob": True, "attention_bias": True},
            {"num_key_value_heads": 1, "num_experts_per_tok": 6, "tie_word_embeddings": True},
        ],
        refused=[NOT_SILU, ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_experts=6")],
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        sizes={**BASE, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32},
        variants=[
            {},
            {"num_hidden_layers": 4, "moe_layer_interval": 2, "moe_layer_start_index": 0},
            {"num_hidden_layers": 4, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
            {"moe_num_shared_experts": 0, "tie_word_embeddings": False},
            {"moe_norm_min": 0.9, "moe_k": 3},
        ],
        refused=[
            ({"use_bias": True}, "use_bias=True is not supported: only False"),
            ({"moe_k": 7}, "moe_k=7 is more than moe_num_experts=6"),
            ({"moe_layer_interval": 0}, "moe_layer_interval=0 is not a number above 0"),
            ({"moe_norm_min": -1}, "moe_norm_min=-1.0 is not a number from"),
            ({"moe_num_shared_experts": -1}, "moe_num_shared_experts=-1 is not a number above 0"),
            ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ],
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        sizes={
            **BASE,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "intermediate_size": 32,
            "intermediate_size_mlp": 40,
            "attention_chunk_size": 7,
            "floor_scale": 4,
            "moe_layers": None,
            "no_rope_layers": None,
        },
        variants=[
            {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
            {"num_experts_per_tok": 3, "use_qk_norm": False, "attn_temperature_tuning": False},
            {
                "rope_parameters": {**YARN, "rope_theta": 500.0},
                "num_hidden_layers": 2,
                "no_rope_layers": [1, 0],
                "layer_types": [FULL, "chunked_attention"],
                "moe_layers": [0],
                "attention_bias": True,
                "tie_word_embeddings": True,
                "attn_scale": 0.3,
            },
        ],
        read=[({}, {"rotary.theta": 5e5})],
        refused=[
            NOT_SILU,
            ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_local_experts=4"),
            ({"moe_layers": [4]}, r"moe_layers=\[4\] is not a list of layers from 0 to 3"),
            ({"no_rope_layers": [1]}, r"no_rope_layers=\[1\] is not 4 times 0 or 1"),
            ({"layer_types": [SLIDING] * 4}, "layer_types has 'sliding_attention', which is not supported"),
            ({"attention_chunk_size": 0}, "attention_chunk_size=0 is not a number above 0"),
            ({"attention_chunk_size": None}, "attention_chunk_size=null leaves the layers with chunks no length"),
        ],
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        sizes={
            **BASE,
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
        },
        variants=[
            {"num_hidden_layers": 2, "use_qk_norm": True, "attention_bias": True},
            {},
            {"first_k_dense_replace": 2, "n_shared_experts": 2},
            {"routed_scaling_factor": 2.5, "norm_topk_prob": False},
            {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
            {"tie_word_embeddings": True},
        ],
        refused=[
            NOT_SILU,
            ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than the 6 experts of topk_group=1 groups"),
            ({"n_group": 4}, "n_routed_experts=6 is not a multiple of n_group=4"),
            ({"partial_rotary_factor": 0.1}, "partial_rotary_factor=0.1 turns 1 of 16 channels"),
            ({"use_qk_norm": "yes"}, "use_qk_norm='yes' is not of type bool"),
            ({"n_routed_experts": None}, "n_routed_experts is missing"),
            ({"num_nextn_predict_layers": 2**40}, "num_nextn_predict_layers=1099511627776 is not between 0 and num_hi"),
        ],
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        sizes={key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
        config={"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5},
        variants=[
            {},
            {"mlp_layer_types": ["dense", "dense", "sparse"]},
            {"mlp_layer_types": ["sparse"] * 3, "routed_scaling_factor": 0.7, "norm_topk_prob": False},
            {"rope_interleave": False, "attention_bias": True},
        ],
        read=[  # configs on the hub give the number of dense layers; the default is one
            ({"topk_method": "noaux_tc"}, {"layer_kinds": (False, True, True)}),
            ({"topk_method": "noaux_tc", "first_k_dense_replace": 2}, {"layer_kinds": (False, False, True)}),
        ],
        refused=[
            ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "is not 3 times 'dense' and then 'sparse'"),
            ({"mlp_layer_types": ["dense", "sparse"]}, "is not 3 times 'dense' and then 'sparse'"),
            ({"mlp_layer_types": 3}, "mlp_layer_types=3 is not 3 times"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported: only 1"),
            ({"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
            ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ],
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        sizes={**BASE, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
        variants=[
            {},
            {"head_dim": 12, "rotary_dim": 6},
            {"num_local_experts": 7, "num_experts_per_tok": 6},
            {"tie_word_embeddings": True, "rms_norm_eps": 1e-3, "num_key_value_heads": 4},
        ],
        read=[
            (  # as on the hub
                {
                    "attn_type_list": [1, 1],
                    "layernorm_mlp_beta": 1.0,
                    "mlp_intermediate_size": 8192,
                    "mtp_transformer_layers": 1,
                    "num_mtp_modules": 3,
                    "qk_norm_type": "per_layer",
                    "rotary_dim": 8,
                    "scoring_func": "sigmoid",
                    "shared_intermediate_size": 0,
                    "shared_moe_mode": "sigmoid",
                    "sliding_window": None,
                    "use_mtp": True,
                    "use_qk_norm": True,
                    "use_routing_bias": True,
                },
                {"rotary.head_dim": 8, "rotary.theta": 5e6},
            )
        ],
        refused=[
            ({"attn_type_list": [1, 0]}, r"attn_type_list=\[1, 0\] is not supported: only 1, softmax attention"),
            ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_local_experts=6"),
            ({"qk_norm_type": "per_head"}, "qk_norm_type='per_head' is not supported: only 'per_layer'"),
            ({"rotary_dim": 32}, "partial_rotary_factor=2.0 turns 32 of 16 channels"),
            ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported: only 'sigmoid'"),
            ({"shared_intermediate_size": 8}, "shared_intermediate_size=8 is not supported: only 0"),
            ({"use_routing_bias": False}, "use_routing_bias=False is not supported: only True"),
        ],
    ),
    "mistral4": Family(
        "Mistral4ForCausalLM",
        sizes={**MISTRAL4, "rope_parameters": {**GROWING}},
        variants=[
            {},
            {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "norm_topk_prob": False},
            {"rope_interleave": False, "attention_bias": True, "first_k_dense_replace": 0, "n_shared_experts": 2},
            {"q_lora_rank": None, "routed_scaling_factor": 2.5, "tie_word_embeddings": True},
        ],
        refused=[
            NOT_SILU,
            ({"rope_parameters": None}, "rope_parameters is missing"),
            ({"n_group": 6, "topk_group": 2}, "n_group=6 leaves 1 expert to a group, which needs 2 to be scored"),
            (
                {"rope_parameters": {**GROWING, "partial_rotary_factor": 1.0}},
                r"partial_rotary_factor=1\.0 is not supported: only 0\.",
            ),
        ],
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        sizes={**BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
        variants=[
            {"num_local_experts": 5},
            {"num_local_experts": 4, "num_experts_per_tok": 1},
            {"num_local_experts": 3, "num_experts_per_tok": 3},
            {"num_local_experts": 8, "sliding_window": 8},
            {"num_local_experts": 8, "head_dim": 24},
            {"num_local_experts": 8, "tie_word_embeddings": True, "rope_theta": 500.0},
        ],
        read=[({}, {"rotary.theta": 1e6})],
        refused=[
            NOT_SILU,
            ({"num_local_experts": None}, "num_local_experts is missing"),
            ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 is not a number above 0"),
            ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_local_experts=4"),
            ({"sliding_window": -1}, "sliding_window=-1 is not a number above 0"),
        ],
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM",
        sizes={**BASE, "head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        variants=[
            {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3},
            {"attention_bias": True, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": False},
            {"rope_parameters": YARN | {"rope_theta": 1e6}, "tie_word_embeddings": True},
        ],
        read=[
            (
                {"intermediate_size": 10240, "first_k_dense_replace": 0},
                {"rotary.theta": 1e6, "layer_kinds": (True,) * 2},
            )
        ],
        refused=[
            NOT_SILU,
            ({"first_k_dense_replace": 1}, "first_k_dense_replace=1 is not supported: only 0"),
            ({"use_qk_norm": True}, "use_qk_norm=True is not supported: only False"),
        ],
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        sizes={
            **{**BASE, "num_local_experts": 4, "head_dim": 16, "max_position_embeddings": 240},
            **{"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 240}, "router_jitter_noise": 1.0},
        },
        lengths=(5, 1, 70, 17, 61),
        variants=[
            {},
            # transformers uses the short factors for every length, so equal factors are compared across the border
            {"rope_parameters": {**LONGROPE, "short_factor": LONG, "original_max_position_embeddings": 60}},
            {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2, "rope_parameters": DEFAULT},
            {"tie_word_embeddings": True, "num_local_experts": 2, "router_jitter_noise": 5.0, "sliding_window": 7},
            {"num_local_experts": 9, "router_jitter_noise": 0.01, "rms_norm_eps": 1e-3},
        ],
        refused=[
            NOT_SILU,
            ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported: only 2"),
            ({"num_local_experts": 1}, "num_local_experts=1 is less than num_experts_per_tok=2"),
            (
                {"rope_parameters": {"rope_type": "yarn"}},
                "rope_type='yarn' is not supported: only 'default', 'longrope'",
            ),
            ({"rope_parameters": {**LONGROPE, "long_mscale": None}}, "long_mscale is missing"),
            ({"rope_parameters": {**LONGROPE, "sharpness": 1}}, "fields that are not supported: sharpness"),
        ],
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        sizes={
            **BASE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
        variants=[
            {},
            {"norm_topk_prob": True},
            {"num_experts": 9, "num_experts_per_tok": 4},
            {"decoder_sparse_step": 2},
            {"mlp_only_layers": [1]},
            {"qkv_bias": False},
            {"tie_word_embeddings": True, "rope_theta": 1e6},
            {**WINDOW, "layer_types": [FULL, SLIDING], "mlp_only_layers": [0]},
        ],
        refused=[
            NOT_SILU,
            (WINDOW, "layer_types is missing, but use_sliding_window is true"),
            ({"layer_types": [SLIDING] * 2}, "but use_sliding_window is not true"),
            ({"num_experts": 0}, "num_experts=0 is not a number above 0"),
            ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_experts=6"),
            ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 is not a number above 0"),
            ({"mlp_only_layers": 1}, "mlp_only_layers=1 is not a list of layers from 0 to 1"),
            ({"mlp_only_layers": [2]}, r"mlp_only_layers=\[2\] is not a list of layers from 0 to 1"),
            ({"norm_topk_prob": 1}, "norm_topk_prob=1 is not of type bool"),
            ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
            ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ],
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        sizes={**BASE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
        variants=[
            {},
            {"norm_topk_prob": True},
            {"num_experts": 9, "num_experts_per_tok": 4},
            {"decoder_sparse_step": 2},
            {"mlp_only_layers": [1]},
            {"attention_bias": True},
            {"head_dim": 32, "norm_topk_prob": True},
            {"tie_word_embeddings": True, "rope_theta": 1e6},
            {**WINDOW, "mlp_only_layers": [0]},
        ],
        refused=[
            NOT_SILU,
            ({"use_sliding_window": True}, "sliding_window is missing"),
            (
                {"use_sliding_window": True, "max_window_layers": 1},
                "max_window_layers=1 is not supported: only 0, None",
            ),
            (
                {"use_sliding_window": True, "layer_types": [FULL, SLIDING]},
                "layer_types=.* is not supported: only .* None",
            ),
            ({"layer_types": [SLIDING] * 2}, "but use_sliding_window is not true"),
            ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_experts=6"),
            ({"num_local_experts": 1}, "num_experts_per_tok=2 is more than num_local_experts=1"),
            ({"mlp_only_layers": ["a"]}, r"mlp_only_layers=\['a'\] is not a list of layers from 0 to 1"),
            ({"attention_bias": "no"}, "attention_bias='no' is not of type bool"),
            ({"num_experts": None}, "num_experts is missing"),
        ],
    ),
}
