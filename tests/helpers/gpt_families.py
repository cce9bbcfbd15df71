"""The table of dense architectures with GPT's pattern, with biases and without a gate: one row per architecture."""

from tests.helpers.family import BASE, LEFT_OUT, THREE_KEYS, Family

GPT2 = {
    "vocab_size": 96,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 72,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPTJ = {**GPT2, "rotary_dim": 8}
GPT = {
    "bloom": Family(
        "BloomForCausalLM",
        sizes={"vocab_size": 96, "hidden_size": 48, "n_layer": 2, "n_head": 4, "eos_token_id": None},
        variants=[
            {},
            {"n_head": 6},  # not a power of two
            {"tie_word_embeddings": False},
            {"apply_residual_connection_post_layernorm": True, "layer_norm_epsilon": 1e-3},
        ],
        refused=[
            ({"n_inner": 100}, "n_inner=100 is not supported: only None, 192"),
            ({"n_head": 5}, "hidden_size=48 is not a multiple of n_head=5"),
            ({"hidden_size": None}, "hidden_size is missing"),
            ({"seq_length": 0}, "seq_length=0 is not a number above 0"),
        ],
    ),
    "codegen": Family(
        "CodeGenForCausalLM",
        sizes=GPTJ,
        variants=[{}, {"n_head": 8, "rotary_dim": 6, "n_inner": 100, "activation_function": "gelu"}],
        refused=[
            ({"n_head": 6, "n_embd": 48, "rotary_dim": 8}, "n_head=6 is not a multiple of the blocks of qkv_proj=4"),
            ({"rotary_dim": 14}, "rotary_dim=14 is not an even number of the 12 channels of a head"),
        ],
    ),
    "falcon": Family(
        "FalconForCausalLM",
        sizes={**BASE, "num_key_value_heads": None, "intermediate_size": None},
        variants=[
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            {},  # one key for all queries
            {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1, "bias": True},
            {"parallel_attn": False, "tie_word_embeddings": False, "ffn_hidden_size": 100},
            {"multi_query": False, "layer_norm_epsilon": 1e-3},
            {"multi_query": False, "parallel_attn": False, "rope_theta": 500.0, "bias": True},
            {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}  # 11B
            | {"tie_word_embeddings": False},
        ],
        refused=[
            ({"alibi": True}, "alibi=True is not supported: only False"),
            ({"activation": "relu"}, "activation='relu' is not supported: only 'gelu'"),
            ({"apply_residual_connection_post_layernorm": True}, "post_layernorm=True is not supported: only False"),
            ({"n_embed": 32}, "n_embed=32 is not supported: only None, 64"),
            ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2 is not supported: only None, 1"),
            (
                {"new_decoder_architecture": True, "num_kv_heads": 3},
                "num_attention_heads=4 is not a multiple of num_kv_heads=3",
            ),
            (
                {"new_decoder_architecture": True, "parallel_attn": False},
                "new_decoder_architecture=true is not supported with parallel_attn=false",
            ),
        ],
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        sizes=GPT2,
        variants=[
            {},
            {"tie_word_embeddings": False},
            {"n_inner": 100, "layer_norm_epsilon": 1e-3, "activation_function": "gelu_pytorch_tanh"},
            {"activation_function": "gelu"},
            {"scale_attn_weights": False},
            {"scale_attn_by_inverse_layer_idx": True},
            # the same in float32 in another order
            {"reorder_and_upcast_attn": True, "_attn_implementation": "eager"},
        ],
        refused=[
            ({"activation_function": "relu"}, "activation_function='relu' is not supported: only 'gelu', 'gelu_fast"),
            ({"add_cross_attention": True}, "add_cross_attention=True is not supported: only False"),
            ({"n_head": 5}, "n_embd=48 is not a multiple of n_head=5"),
            ({"n_layer": None}, "n_layer is missing"),
            ({"n_positions": 0}, "n_positions=0 is not a number above 0"),
        ],
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        sizes=GPT2,
        variants=[
            {},
            {"multi_query": False, "tie_word_embeddings": False, "activation_function": "gelu"},
            {"n_inner": 100, "layer_norm_epsilon": 1e-3, "scale_attn_weights": False},
        ],
        refused=[
            ({"add_cross_attention": True}, "add_cross_attention=True is not supported: only False"),
            ({"multi_query": True, "num_key_value_heads": 4}, "num_key_value_heads=4 is not supported: only 1, None"),
            ({"n_head": 5}, "n_embd=48 is not a multiple of n_head=5"),
        ],
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        sizes={
            **{"vocab_size": 96, "hidden_size": 48, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 72},
            **{"attention_types": [[["global", "local"], 1]], "window_size": 6, "eos_token_id": None},
        },
        variants=[
            {},
            {"attention_types": [[["local"], 1], [["global"], 1]], "tie_word_embeddings": False, "window_size": 9},
            {"intermediate_size": 100, "activation_function": "gelu", "layer_norm_epsilon": 1e-3},
        ],
        config={"rms_norm_eps": LEFT_OUT},
        read=[({"attention_types": [[["global"], 2]]}, {"windows": (None, None), "capabilities.has_windows": False})],
        refused=[
            ({"attention_types": [[["global", "local"], 2]]}, "must give num_layers=2 layers alike"),
            ({"attention_layers": ["local", "global"]}, "must give num_layers=2 layers alike"),
            ({"attention_types": [[["flash"], 2]]}, r"attention_types=\[\[\['flash'\], 2\]\] is not a list of"),
            ({"attention_types": 3}, "attention_types=3 is not a list of"),
            ({"window_size": 0}, "window_size=0 is not a number above 0"),
        ],
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        sizes=GPTJ,
        variants=[
            {},
            {"rotary_dim": 12, "n_inner": 100, "layer_norm_epsilon": 1e-3},
            {"activation_function": "gelu", "tie_word_embeddings": True},
        ],
        refused=[
            ({"rotary_dim": 13}, "rotary_dim=13 is not an even number of the 12 channels of a head"),
            ({"rotary": False}, "rotary=False is not supported: only None, True"),
            ({"activation_function": "relu"}, "activation_function='relu' is not supported: only 'gelu', 'gelu_fast"),
        ],
    ),
    "mpt": Family(
        "MptForCausalLM",
        sizes={
            **{"vocab_size": 96, "d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 72},
            **{"eos_token_id": None, "expansion_ratio": 4},
        },
        variants=[
            {},
            {"n_heads": 6, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
            {"attn_config": {"clip_qkv": 0.4}},
            {"attn_config": {"softmax_scale": 0.5}},
        ],
        refused=[
            ({"no_bias": False}, "no_bias=False is not supported: only True"),
            ({"logit_scale": 2.0}, r"logit_scale=2\.0 is not supported: only None"),
            ({"attn_config": {"alibi_bias_max": 4}}, "alibi_bias_max=4 is not supported: only 8"),
            ({"attn_config": {"alibi": False}}, "alibi=False is not supported: only True"),
            ({"attn_config": {"qk_ln": True}}, "qk_ln=True is not supported: only False, None"),
            ({"attn_config": {"kv_n_heads": 2}}, "attn_config has fields that are not supported: kv_n_heads"),
            ({"expansion_ratio": 2}, "expansion_ratio=2 is not supported: only 4"),
        ],
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        sizes={**BASE, "num_key_value_heads": None},
        variants=[
            {},
            {"use_parallel_residual": False, "tie_word_embeddings": True},
            {"rotary_pct": 1.0, "rotary_emb_base": 500, "attention_bias": False, "layer_norm_eps": 1e-3},
            {"hidden_act": "gelu_fast"},
            {"hidden_act": "gelu_new", "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}},
        ],
        refused=[
            (
                {"hidden_act": "relu"},
                "hidden_act='relu' is not supported: only 'gelu', 'gelu_fast', 'gelu_new', 'gelu_p",
            ),
            ({"rotary_pct": 0.2}, r"partial_rotary_factor=0\.2 turns 3 of 16 channels, not an even number"),
            ({"rope_theta": 5, "rotary_emb_base": 6}, r"rope_theta=5 is not supported: only None, 6\.0"),
            ({"num_attention_heads": 5}, "hidden_size=64 is not a multiple of num_attention_heads=5"),
        ],
    ),
    "opt": Family(
        "OPTForCausalLM",
        sizes={
            "vocab_size": 96,
            "hidden_size": 48,
            "ffn_dim": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 72,
            "eos_token_id": None,
        },
        variants=[
            {},
            {"tie_word_embeddings": False},
            {"do_layer_norm_before": False},
            {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
            {"word_embed_proj_dim": 64, "tie_word_embeddings": False},
            {"_remove_final_layer_norm": True},
            {"activation_function": "gelu", "enable_bias": False},  # Galactica
            {"layer_norm_elementwise_affine": False},
        ],
        refused=[
            ({"activation_function": "silu"}, "activation_function='silu' is not supported: only 'relu', 'gelu'"),
            ({"num_attention_heads": 5}, "hidden_size=48 is not a multiple of num_attention_heads=5"),
            ({"ffn_dim": None}, "ffn_dim is missing"),
            ({"do_layer_norm_before": 1}, "do_layer_norm_before=1 is not of type bool"),
        ],
    ),
    "phi": Family(
        "PhiForCausalLM",
        variants=[
            {},
            {"partial_rotary_factor": 0.25, "num_key_value_heads": 4, "layer_norm_eps": 1e-3},
            {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}, "num_key_value_heads": 1},
        ],
        refused=[
            ({"hidden_act": "silu"}, "hidden_act='silu' is not supported: only 'gelu_new', 'gelu_pytorch_tanh'"),
            ({"head_dim": 32}, "head_dim=32 is not supported: only None, 16"),
            ({"qk_layernorm": True}, "qk_layernorm=True is not supported: only False"),
            ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported: only False"),
            ({"partial_rotary_factor": 0.2}, r"partial_rotary_factor=0\.2 turns 3 of 16 channels, not an even number"),
        ],
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        variants=[
            {"sliding_window": 6},
            {"tie_word_embeddings": False, "use_bias": False, "num_key_value_heads": 1, "norm_epsilon": 1e-3},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        ],
        refused=[
            ({"hidden_act": "silu"}, "hidden_act='silu' is not supported: only 'gelu_pytorch_tanh'"),
            ({"mlp_type": "gated"}, "mlp_type='gated' is not supported: only None, 'default'"),
            THREE_KEYS,
        ],
    ),
}
