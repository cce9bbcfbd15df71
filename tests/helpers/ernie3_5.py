"""A small Ernie 3.5 in PaddleNLP's layout. Every number is random."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.paddle_files import Arrays, save_safetensors

VOCAB, HIDDEN, WIDE, LAYERS, HEADS = 64, 24, 40, 4, 2
CONFIG = {
    "model_type": "ernie",
    "architectures": ["Ernie35ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 1024,
    "layer_norm_eps": 1e-6,
    "use_bias": True,
    "weight_share_add_bias": True,
    "parallel_attn_hatf": True,
    "enable_random_position_ids": True,
    "tie_word_embeddings": False,
    "fuse_linear": False,
    "fuse_ln": False,
    "ignored_index": -100,
    "use_progressive_seq_len": True,
    "use_recompute_attn": False,
}
FUSED, OUT = "self_attn_mlp.qkv_gate_up_proj", "self_attn_mlp.o_proj"


def make_arrays(config: dict[str, Any]) -> Arrays:
    random = np.random.default_rng(5)
    shapes = {"lm_head": (HIDDEN, VOCAB)}
    norms = ["ernie.norm"]
    for i in range(LAYERS):
        layer, is_first, is_last = f"ernie.layers.{i}", i == 0, i == LAYERS - 1
        if not config["parallel_attn_hatf"] or not (is_first or is_last):
            shapes[f"{layer}.{FUSED}"] = (HIDDEN, 3 * HIDDEN + 2 * WIDE)
            shapes[f"{layer}.{OUT}"] = (HIDDEN + WIDE, HIDDEN)
            norms.append(f"{layer}.input_layernorm")
        elif is_first:
            shapes |= {f"{layer}.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
            norms.append(f"{layer}.input_layernorm")
        else:
            shapes |= {f"{layer}.mlp.{name}_proj": (HIDDEN, WIDE) for name in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj"] = (WIDE, HIDDEN)
            norms.append(f"{layer}.post_attention_layernorm")
    arrays = {f"{name}.weight": random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["ernie.embed_tokens.weight"] = random.normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32)
    with_bias = [name for name in shapes if name != "lm_head" or config["weight_share_add_bias"]] * config["use_bias"]
    for name in norms:
        arrays[f"{name}.weight"] = random.normal(1, 0.3, HIDDEN).astype(np.float32)
    for name in norms + with_bias:
        arrays[f"{name}.bias"] = random.normal(0, 0.3, arrays[f"{name}.weight"].shape[-1]).astype(np.float32)
    return arrays


def write(folder: Path, arrays: Arrays, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_safetensors(folder / "model.safetensors", arrays)
