"""The table of dense architectures with LayerNorms, or with other norms or activations than Llama's: one row per
architecture."""

from tests.helpers.dense_families import LLAMA3
from tests.helpers.family import BASE, FULL, NOT_SILU, SLIDING, THREE_KEYS, YARN, Family

NOT_RELU2 = ({"hidden_act": "silu"}, "hidden_act='silu' is not supported: only 'relu2'")
XIELU = {"hidden_act": "xielu", "rope_parameters": {"rope_type": "default", "rope_theta": 12e6}}
WITH_LAYER_NORMS = {
    "apertus": Family(
        "ApertusForCausalLM",
        sizes={**BASE, **XIELU},
        variants=[
            {},
            {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "num_key_value_heads": 1},
            {"attention_bias": True, "rms_norm_eps": 1e-3, "num_key_value_heads": 4},
        ],
        refused=[
            ({"hidden_act": "silu"}, "hidden_act='silu' is not supported: only 'xielu'"),
            ({"post_norm": True}, "post_norm=True is not supported: only None, False"),
            ({"rope_parameters": None}, "rope_parameters is missing"),
            THREE_KEYS,
        ],
    ),
    "bitnet": Family(
        "BitNetForCausalLM",
        variants=[
            {},
            {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
            {"hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 500.0},
        ],
        refused=[({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'relu2', 'silu'"), THREE_KEYS],
    ),
    "jais2": Family(
        "Jais2ForCausalLM",
        variants=[{}, {"attention_bias": False, "mlp_bias": False, "layer_norm_eps": 1e-3, "head_dim": 8}],
        refused=[NOT_RELU2, THREE_KEYS],
    ),
    "nanochat": Family(
        "NanoChatForCausalLM",
        variants=[
            {},
            {"attention_bias": True, "final_logit_softcapping": None, "tie_word_embeddings": True, "rope_theta": 500.0},
            {"num_key_value_heads": 1, "rms_norm_eps": 1e-3, "final_logit_softcapping": 2.0},
            {"rope_parameters": {**YARN, "rope_theta": 500.0}},
        ],
        refused=[NOT_RELU2, THREE_KEYS, ({"final_logit_softcapping": -1}, "final_logit_softcapping=-1")],
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        variants=[
            {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
            {"attention_bias": True, "mlp_bias": True, "norm_eps": 1e-3, "tie_word_embeddings": True, "head_dim": 8},
        ],
        refused=[NOT_RELU2, THREE_KEYS],
    ),
    "olmo": Family(
        "OlmoForCausalLM",
        variants=[{}, {"clip_qkv": 0.4, "attention_bias": True, "tie_word_embeddings": True}],
        refused=[NOT_SILU, ({"clip_qkv": -1.0}, r"clip_qkv=-1\.0 is not a number from 1e-30")],
    ),
    "cohere": Family(
        "CohereForCausalLM",
        variants=[
            {"use_qk_norm": True, "num_key_value_heads": 4},
            {"logit_scale": 0.3, "rope_theta": 5e5},
            {"tie_word_embeddings": False, "attention_bias": True, "layer_norm_eps": 1e-3, "num_key_value_heads": 1},
        ],
        read=[({}, {"rotary.theta": 5e5})],
        refused=[NOT_SILU, THREE_KEYS, ({"logit_scale": 0}, r"logit_scale=0\.0 is not a number from 1e-30")],
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        variants=[
            {},
            {"use_qkv_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
            {"use_parallel_residual": True, "qk_layernorm": True, "layer_norm_eps": 1e-3},
            {"qk_layernorm": True, "rope_parameters": {"rope_theta": 5e4, "partial_rotary_factor": 0.5}},
        ],
        refused=[NOT_SILU, THREE_KEYS, ({"qk_layernorm": 1}, "qk_layernorm=1 is not of type bool")],
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        variants=[
            {"sliding_window": 6, "sliding_window_pattern": 2},
            {"num_hidden_layers": 5, "sliding_window": 7, "logit_scale": 0.3},
            {"tie_word_embeddings": False, "attention_bias": True, "layer_norm_eps": 1e-3},
            {
                "layer_types": [FULL, SLIDING],
                "sliding_window": 9,
                "num_key_value_heads": 1,
                "rope_theta": 50000.0,
            },
        ],
        refused=[
            NOT_SILU,
            ({"use_qk_norm": True}, "use_qk_norm=True is not supported: only None, False"),
            ({"use_parallel_block": False}, "use_parallel_block=False is not supported: only None, True"),
            ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi' is not supported"),
            ({"sliding_window": None}, "sliding_window is null, but layers slide: give its length, or layer_types"),
            ({"logit_scale": 0}, r"logit_scale=0\.0 is not a number from 1e-30"),
        ],
    ),
}
