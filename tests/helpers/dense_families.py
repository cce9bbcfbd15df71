"""The table of dense architectures with Llama's pattern: one row per architecture."""

from typing import Any

from tests.helpers.family import BASE, FULL, LEFT_OUT, NOT_SILU, SLIDING, THREE_KEYS, YARN, Family

DYNAMIC = {"rope_type": "dynamic", "factor": 6.0}
SHORT = [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5]
LONG = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
GROWING: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 7,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
# the other implementations drop the soft cap
GEMMA: dict[str, Any] = {**BASE, "head_dim": 16, "attn_implementation": "eager"}
SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}

GLM: dict[str, Any] = {
    "sizes": {**BASE, "head_dim": 16},
    "variants": [
        {},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"num_key_value_heads": 1, "attention_bias": False},
        {"head_dim": 40},
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}},
        {
            "rope_parameters": {**DYNAMIC, "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "max_position_embeddings": 32,
        },
        {"rope_parameters": {**YARN, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ],
    "refused": [
        NOT_SILU,
        THREE_KEYS,
        ({"partial_rotary_factor": 0.2}, r"partial_rotary_factor=0\.2 turns 3 of 16 channels, not an even number"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor=1\.5 turns 24 of 16 channels"),
        ({"partial_rotary_factor": 1e30}, r"partial_rotary_factor=1e\+30 turns 32 of 16 channels"),
        ({"partial_rotary_factor": 0.01}, r"partial_rotary_factor=0\.01 turns 0 of 16 channels"),
        ({"partial_rotary_factor": 0}, r"partial_rotary_factor=0\.0 is not a number from 1e-30"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, r"partial_rotary_factor=0\.2 turns 3 of 16 channels"),
        ({"rope_scaling": {"type": "su"}}, r"type='su' is not supported"),
    ],
}

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
DENSE = {
    "arcee": Family(
        "ArceeForCausalLM",
        variants=[{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 8}],
        refused=[({"hidden_act": "silu"}, "hidden_act='silu' is not supported: only 'relu2'"), THREE_KEYS],
    ),
    "cwm": Family(
        "CwmForCausalLM",
        sizes={**BASE, "head_dim": 16},
        variants=[
            {"sliding_window": 6, "num_hidden_layers": 5},
            {"layer_types": [SLIDING, FULL], "sliding_window": 9, "mlp_bias": True},
        ],
        config={"rope_scaling": LLAMA3},
        read=[({}, {"windows": (None, 8192), "rotary.theta": 1e6})],
        refused=[
            NOT_SILU,
            ({"layer_types": [FULL]}, "layer_types=.* is not 2 times 'sliding_attention' or 'full_att"),
            ({"rope_scaling": LEFT_OUT}, "rope_parameters is missing: give rope_type, factor and the other settings"),
        ],
    ),
    "helium": Family(
        "HeliumForCausalLM",
        sizes={**BASE, "head_dim": 16},
        variants=[{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
        read=[({}, {"rotary.theta": 1e5})],
        refused=[NOT_SILU, THREE_KEYS],
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        sizes={**BASE, "head_dim": 16},
        variants=[{}, {"head_dim": 40, "num_key_value_heads": 1, "attention_bias": True}],
        read=[
            ({"hidden_act": "gelu", "hidden_activation": None}, {"tie_word_embeddings": True}),
            ({"hidden_activation": "gelu_pytorch_tanh"}, {"context_length": 128}),
        ],
        refused=[
            ({"hidden_act": "relu"}, "hidden_act='relu' is not supported: only 'gelu_pytorch_tanh', 'gelu'"),
            ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
            ({"head_dim": None}, "head_dim is missing"),
        ],
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        sizes={**BASE, "head_dim": 16},
        variants=[
            {"head_dim": 8, "use_bias": True},
            {"tie_word_embeddings": False},
            {"use_bias": True, "tie_word_embeddings": False},
            {"head_dim": 32, "num_key_value_heads": 1},
        ],
        read=[
            (
                {"max_position_embeddings": LEFT_OUT},
                {
                    "tie_word_embeddings": True,
                    "use_bias": False,
                    "rotary.theta": 500000.0,
                    "context_length": 131072,
                },
            )
        ],
        refused=[
            ({"head_dim": None}, "head_dim is missing"),
            NOT_SILU,
            ({"use_bias": 1}, "use_bias=1 is not of type bool"),
        ],
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        variants=[
            {"sliding_window": 6, "sliding_window_pattern": 2},
            {"num_hidden_layers": 5, "sliding_window": 7},
            {"sliding_window": 9, "sliding_window_pattern": 2, "num_key_value_heads": 1, "rope_theta": 1e6},
            {"sliding_window": 9, "sliding_window_pattern": "LLLG", "layer_types": [SLIDING, FULL]},
            {"sliding_window": None, "layer_types": [FULL] * 2, "tie_word_embeddings": True},
            {"sliding_window": 9, "layer_types": [FULL] * 2, "head_dim": 24},  # no rotation
        ],
        refused=[
            NOT_SILU,
            ({"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG' is not of type int"),
            (
                {"sliding_window": None, "layer_types": [SLIDING] * 2},
                "layer_types=.* is not supported: only None",
            ),
        ],
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        sizes={
            **GEMMA,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 10,
            "sliding_window": 9,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,  # small enough to matter
        },
        variants=[
            {},
            {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            {"tie_word_embeddings": False, "attention_bias": True, "rms_norm_eps": 1e-3},
            {"layer_types": [FULL, FULL, SLIDING]},
            {"num_key_value_heads": 1, "rope_theta": 300.0},
            {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 30},
        ],
        read=[
            (
                dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"), LEFT_OUT),
                {
                    "attn_logit_softcapping": 50.0,
                    "final_logit_softcapping": 30.0,
                    "windows": (4096, None, 4096),
                },
            ),
            ({"attn_logit_softcapping": None}, {"attn_logit_softcapping": None}),
        ],
        refused=[
            ({"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported: only 'gelu_pytorch_tanh'"),
            ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
            THREE_KEYS,
            ({"head_dim": 15}, "head_dim=15 is odd"),
            ({"layer_types": [FULL]}, r"layer_types=\['full_attention'\] is not 3 times 'sliding_attention'"),
            ({"layer_types": [1, 2, 3]}, r"layer_types=\[1, 2, 3\] is not 3 times"),
            ({"layer_types": "full"}, "layer_types='full' is not 3 times"),
            ({"attn_logit_softcapping": 0}, "attn_logit_softcapping=0.0 is not a number from 1e-30"),
            ({"final_logit_softcapping": "x"}, "final_logit_softcapping='x' is not of type float"),
            ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1.0 is not a number from 1e-30"),
        ],
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        model_type="gemma3_text",
        sizes={**GEMMA, "sliding_window": 6, "sliding_window_pattern": 2},
        variants=[
            {},
            {
                "query_pre_attn_scalar": 10,
                "rope_parameters": {FULL: SCALED, SLIDING: {"rope_type": "default", "rope_theta": 100.0}},
            },
            {"num_hidden_layers": 7, "sliding_window_pattern": 6},
            {"tie_word_embeddings": False, "attention_bias": True, "rms_norm_eps": 1e-3},
            {
                "num_hidden_layers": 4,
                "final_logit_softcapping": 2.0,
                "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
            },
            {"num_key_value_heads": 1},
        ],
        refused=[
            ({"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported: only 'gelu_pytorch_tanh'"),
            ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
            ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported: only None"),
            THREE_KEYS,
            ({"head_dim": 15}, "head_dim=15 is odd"),
            ({"sliding_window": None}, "sliding_window is null, but layers slide: give its length, or layer_types"),
            (
                {
                    "rope_parameters": {FULL: {"rope_type": "default"}},
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                },
                "has rope_parameters and rope_scaling: leave one of them out",
            ),
            ({"sliding_window_pattern": 0}, "sliding_window_pattern=0 is not a number above 0"),
            ({"layer_types": ["chunked"] * 2}, "is not 2 times 'sliding_attention' or 'full_attention'"),
            (
                {"rope_parameters": {"rope_type": "default"}},
                "rope_parameters has rope_type: expected full_attention, sl",
            ),
            ({"rope_parameters": {FULL: {"rope_type": "su"}}}, "rope_type='su' is not supported: only 'default', 'lin"),
            ({"rope_parameters": {SLIDING: {"rope_type": "su"}}}, "rope_type='su' is not supported"),
        ],
    ),
    "glm": Family("GlmForCausalLM", **GLM),
    "glm4": Family("Glm4ForCausalLM", **GLM),
    "granite": Family(
        "GraniteForCausalLM",
        variants=[
            {"residual_multiplier": 0.5, "logits_scaling": 3.0},
            {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.4,
                "residual_multiplier": 0.7,
                "logits_scaling": 1.7,
            },
            {"tie_word_embeddings": True, "logits_scaling": 8, "embedding_multiplier": 12},
            {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.22},
        ],
        refused=[
            NOT_SILU,
            ({"logits_scaling": 0}, r"logits_scaling=0\.0 is not a number from 1e-30"),
            ({"residual_multiplier": "x"}, "residual_multiplier='x' is not of type float"),
        ],
    ),
    "internlm2": Family(  # Llama with rearranged weights
        "InternLM2Twin",
        variants=[
            {},
            {"rope_parameters": {**DYNAMIC, "rope_theta": 1e6}, "max_position_embeddings": 24},
            {"attention_bias": True, "rope_theta": 5e4},
            {"num_key_value_heads": 1, "num_attention_heads": 3, "hidden_size": 66},
            {"num_key_value_heads": 4, "tie_word_embeddings": True},
        ],
        read=[({}, {"bias": True})],  # the default of its code
        refused=[
            ({"bias": 1}, "bias=1 is not of type bool"),
            NOT_SILU,
            THREE_KEYS,
            ({"rope_scaling": {"type": "su"}}, "type='su' is not supported"),
        ],
    ),
    # transformers has no InternLM3. InternLM3's own code computes Llama's layers. `qkv_bias` adds the bias of queries,
    # keys and values, and `bias` the bias of every other projection: Seed-OSS's layers with attention_out_bias and
    # mlp_bias alike.
    "internlm3": Family(
        "InternLM3Twin",
        sizes={**BASE, "head_dim": 16, "attention_bias": False, "attention_out_bias": False, "mlp_bias": False},
        variants=[
            {"attention_bias": True},
            {
                "max_position_embeddings": 24,
                "rope_parameters": {**DYNAMIC, "rope_theta": 5e4},
                "num_key_value_heads": 1,
            },
            {"attention_bias": True, "rope_theta": 1e6},
            {"attention_out_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
        ],
        refused=[
            ({"qkv_bias": 1}, "qkv_bias=1 is not of type bool"),
            ({"bias": "no"}, "bias='no' is not of type bool"),
            NOT_SILU,
        ],
    ),
    "llama": Family(
        "LlamaForCausalLM",
        variants=[
            {},
            {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8},
            {"num_attention_heads": 4, "num_key_value_heads": 1},
            {"num_attention_heads": 8, "num_key_value_heads": 1},
            {"head_dim": 80},
            {"tie_word_embeddings": True},
            {"attention_bias": True, "mlp_bias": True},
            {"tie_word_embeddings": True, "attention_bias": True, "rope_theta": 500.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
            {"rope_scaling": LLAMA3},
            {"rope_scaling": YARN},
            {
                "rope_scaling": {
                    **YARN,
                    "mscale": 0.8,
                    "mscale_all_dim": 0.5,
                    "beta_fast": 16.0,
                    "beta_slow": 2.0,
                    "truncate": False,
                }
            },
        ],
        refused=[],  # tests/models/test_config.py
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        sizes={**BASE, "head_dim": 16, "rope_parameters": GROWING},
        variants=[
            {},
            {"rope_parameters": {**GROWING, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 2.0}},
            {"rope_parameters": {**GROWING, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}},
            {"rope_parameters": {**GROWING, "max_position_embeddings": 128}},
            {"sliding_window": 9, "tie_word_embeddings": True},
        ],
        # the base of the angles next to the other settings, where transformers reads it unless the settings name it
        read=[
            (
                {
                    "rope_theta": 5e5,
                    "rope_parameters": {key: value for key, value in GROWING.items() if key != "rope_theta"},
                },
                {"rotary.theta": 5e5},
            )
        ],
        refused=[
            ({"rope_parameters": None}, "rope_parameters is missing"),
            ({"rope_parameters": {**GROWING, "llama_4_scaling_beta": None}}, "llama_4_scaling_beta is missing"),
            (
                {"rope_parameters": {**GROWING, "llama_4_scaling_beta": -1}},
                "llama_4_scaling_beta=-1.0 is not a number fr",
            ),
            ({"rope_parameters": {**GROWING, "original_max_position_embeddings": 0}}, "is not a number above 0"),
            (
                {"rope_parameters": {**GROWING, "max_position_embeddings": 32}},
                "max_position_embeddings=32 is not supported: only 128",
            ),
            (
                {"max_position_embeddings": 2**21},
                "original_max_position_embeddings=7 is less than 1 / 65536 of the context, 2097152",
            ),
            ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has rope_parameters and rope_scaling"),
            (
                {"rope_parameters": {**GROWING, "sharpness": 1}},
                "rope_scaling has fields that are not supported: sharpn",
            ),
        ],
    ),
    "mistral": Family(
        "MistralForCausalLM",
        variants=[
            {"sliding_window": 8},
            {"sliding_window": None},
            {"sliding_window": 2},
            {"sliding_window": 8, "head_dim": 24},
            {"sliding_window": None, "tie_word_embeddings": True, "rope_theta": 500.0},
            {"rope_scaling": YARN},
        ],
        read=[
            ({}, {"sliding_window": 4096}),
            ({"sliding_window": None}, {"sliding_window": None}),
        ],  # as in transformers
        refused=[
            NOT_SILU,
            ({"sliding_window": 0}, "sliding_window=0 is not a number above 0"),
            ({"sliding_window": "8"}, "sliding_window='8' is not of type int"),
            THREE_KEYS,
            ({"hidden_size": 33}, "hidden_size=33 is not a multiple of num_attention_heads=4"),
            ({"head_dim": 7}, "head_dim=7 is odd"),
            ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
            ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ],
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        variants=[
            {},
            {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4},
            {"rope_scaling": YARN},
        ],
        refused=[NOT_SILU, ({"attention_bias": 1}, "attention_bias=1 is not of type bool"), THREE_KEYS],
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        variants=[
            {"sliding_window": 6, "layer_types": [FULL, SLIDING]},
            {"num_hidden_layers": 5, "sliding_window": 7},
            {
                "layer_types": [FULL, SLIDING],
                "sliding_window": 9,
                "rope_parameters": {
                    FULL: {**YARN, "rope_theta": 3000.0},
                    SLIDING: {"rope_type": "default", "rope_theta": 500.0},
                },
            },
            {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
            {"head_dim": 24, "sliding_window": 9},
        ],
        refused=[
            NOT_SILU,
            ({"head_dim": 7}, "head_dim=7 is odd"),
            ({"hidden_size": 38}, "hidden_size=38 is not a multiple of num_attention_heads=4"),
            ({"layer_types": [FULL]}, "is not 2 times 'sliding_attention' or 'full_attention'"),
            ({"rope_parameters": {"linear_attention": {}}}, "rope_parameters has linear_attention: expected full_atte"),
        ],
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        sizes={**BASE, "max_position_embeddings": 240, "original_max_position_embeddings": 60},
        lengths=(5, 1, 70, 17, 61),  # with new tokens below the original length, and above it from the first token on
        variants=[
            {},
            {"tie_word_embeddings": True, "sliding_window": 7, "rope_theta": 500.0},
            {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
            {"partial_rotary_factor": 0.5},
            {"rope_scaling": LONGROPE},
            {"rope_scaling": LONGROPE, "sliding_window": 20},
            {"rope_scaling": {**LONGROPE, "attention_factor": 1.3, "factor": 2.0}},
            {"rope_scaling": {**LONGROPE, "factor": 8.0}},
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 240},
            {
                "rope_scaling": {**LONGROPE, "short_factor": SHORT[2:], "long_factor": LONG[2:]},
                "partial_rotary_factor": 0.75,
            },
        ],
        refused=[
            NOT_SILU,
            ({"attention_bias": True}, "attention_bias=True is not supported"),
            ({"mlp_bias": True}, "mlp_bias=True is not supported"),
            ({"lm_head_bias": True}, "lm_head_bias=True is not supported"),
            ({"full_attn_mod": 2}, "full_attn_mod=2 is not supported: only 1"),
            ({"interpolate_factor": 4}, "interpolate_factor=4 is not supported: only 1"),
            THREE_KEYS,
            ({"num_attention_heads": 6}, "hidden_size=64 is not a multiple of num_attention_heads=6"),
            ({"sliding_window": 0}, "sliding_window=0 is not a number above 0"),
            ({"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 turns 3 of 16 channels"),
            ({"partial_rotary_factor": 2}, "partial_rotary_factor=2.0 turns 32 of 16 channels"),
            ({"partial_rotary_factor": 1e30}, "turns 32 of 16 channels"),
            (
                {"rope_scaling": {"type": "linear", "factor": 2.0}},
                "type='linear' is not supported: only 'default', 'lo",
            ),
            ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor is not a list of 8 numbers"),
            ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is not a list of 8 numbers"),
            (
                {"rope_scaling": {**LONGROPE, "short_factor": [0] * 8}},
                "short_factor holds what is not a number above 0",
            ),
            (
                {"rope_scaling": {**LONGROPE, "short_factor": [True] * 8}},
                "short_factor holds what is not a number above",
            ),
            ({"rope_scaling": {**LONGROPE, "short_factor": [10**400] * 8}}, "not a number above 0 and below 2"),
            ({"rope_scaling": {**LONGROPE, "long_mscale": 1.2}}, "fields that are not supported: long_mscale"),
        ],
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        variants=[
            {"sliding_window": 8},
            {"tie_word_embeddings": True, "rope_theta": 1e6},
            {"num_key_value_heads": 4},
            {**WINDOW, "max_window_layers": 1},
            {**WINDOW, "max_window_layers": 0},
            {**WINDOW, "max_window_layers": 2},
            {**WINDOW, "layer_types": [SLIDING, FULL]},
            {"rope_scaling": YARN},
        ],
        refused=[
            NOT_SILU,
            ({"use_sliding_window": "yes"}, "use_sliding_window='yes' is not of type bool"),
            ({"use_sliding_window": True, "max_window_layers": 0}, "sliding_window is missing"),
            ({**WINDOW, "max_window_layers": "0"}, "max_window_layers='0' is not of type int"),
            ({**WINDOW, "max_window_layers": 1, "sliding_window": 0}, "sliding_window=0 is not a number above 0"),
            ({"layer_types": [FULL]}, "is not a list of num_hidden_layers=2 types"),
            ({"layer_types": FULL}, "is not a list of num_hidden_layers=2 types"),
            ({"layer_types": [FULL, "linear_attention"]}, "'linear_attention', which is not supported: only"),
            ({"layer_types": [SLIDING] * 2, "sliding_window": 8}, "but use_sliding_window is not true"),
        ],
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        sizes={**BASE, "head_dim": 16},
        variants=[
            {"head_dim": 32},
            {"tie_word_embeddings": True, "rope_theta": 1e6},
            {"attention_bias": True},
            {"head_dim": 8, "num_key_value_heads": 4},
            {**WINDOW, "max_window_layers": 1},
            {"rope_scaling": YARN},
        ],
        refused=[
            NOT_SILU,
            ({"head_dim": None}, "head_dim is missing"),
            ({"attention_bias": 1}, "attention_bias=1 is not of type bool"),
            ({"use_sliding_window": True, "max_window_layers": 1}, "sliding_window is missing"),
            ({"layer_types": [SLIDING] * 2, "sliding_window": 8}, "but use_sliding_window is not true"),
        ],
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        sizes={**BASE, "head_dim": 16},
        variants=[
            {},
            {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
            {"tie_word_embeddings": True, "head_dim": 24, "num_key_value_heads": 1},
        ],
        refused=[
            ({"head_dim": None}, "head_dim is missing"),
            ({"attention_out_bias": 1}, "attention_out_bias=1 is not of type bool"),
        ],
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        variants=[
            {"no_rope_layer_interval": 2},
            {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 0]},
            {"num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True},
            {
                "tie_word_embeddings": False,
                "no_rope_layer_interval": 2,
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": [FULL, SLIDING],
            },
        ],
        refused=[
            ({}, "rope_theta is missing"),
            ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
            ({"rope_theta": 1e4, "no_rope_layers": [1]}, r"no_rope_layers=\[1\] is not 2 times 0 or 1"),
            ({"rope_theta": 1e4, "no_rope_layers": [1, 2]}, r"no_rope_layers=\[1, 2\] is not 2 times 0 or 1"),
            ({"rope_theta": 1e4, "no_rope_layer_interval": 0}, "no_rope_layer_interval=0 is not a number above 0"),
            ({"rope_theta": 1e4, "use_sliding_window": True}, "layer_types is missing, but use_sliding_window is true"),
        ],
    ),
    "telechat": Family(  # Llama with rearranged weights
        "TeleChatTwin",
        sizes={**BASE, "attention_bias": True, "mlp_bias": True},
        config={
            "n_layer": 2,
            "n_head": 4,
            "ffn_hidden_size": 88,
            "training_seqlen": 8192,
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "intermediate_size"), LEFT_OUT),
            **dict.fromkeys(("num_key_value_heads", "rms_norm_eps", "max_position_embeddings"), LEFT_OUT),
            **dict.fromkeys(("attention_bias", "mlp_bias"), LEFT_OUT),
        },
        variants=[
            {},
            {"num_key_value_heads": 1, "num_attention_heads": 3, "hidden_size": 66},
            {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
        ],
        read=[({}, {"context_length": 8192, "num_key_value_heads": 4})],
        refused=[
            ({"apply_residual_connection_post_layernorm": True}, "post_layernorm=True is not supported: only False"),
            ({"embed_layernorm": True}, "embed_layernorm=True is not supported: only False"),
            ({"logn": True}, "logn=True is not supported: only False"),
            ({"n_inner": 7}, "n_inner=7 is not supported: only None"),
            ({"num_key_value_heads": 3}, "n_head=4 is not a multiple of num_key_value_heads=3"),
            ({"hidden_size": 60}, r"hidden_size=60 is not a multiple of 2 \* n_head=8"),
            ({"hidden_size": 8}, "training_seqlen above base_seqlen needs more than 2 channels"),
            ({"base_seqlen": 0}, "base_seqlen=0 is not a number above 0"),
            ({"ffn_hidden_size": None}, "ffn_hidden_size is missing"),
        ],
    ),
}
