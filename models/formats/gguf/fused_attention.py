"""Architectures whose fused rows of queries, keys and values llama.cpp's converter reorders or separates: config keys and
tensor names.

Key names are from gguf's constants.py, and what files do not say is from llama.cpp's code of the architecture.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from conf.errors import UserError
from models.formats.gguf.decoder_config import decoder_shape, rotary_decoder
from models.formats.gguf.header import GGUFMetadata
from models.formats.gguf.names import MLP, OUTSIDE_LAYERS, PRE_NORMS, TensorLayout
from models.formats.gguf.rotary import rope_scaling

SECOND_NORM = "attn_norm_2"
SEPARATED = ("attn_q", "attn_k", "attn_v")
LAYERS_WITH_ROTATION, LAYERS_WITH_ALIBI = 32, 40
"""llama.cpp tells Baichuan 7B and 13B by their numbers of layers."""
BAICHUAN2_VOCABULARY = 125696

FALCON = TensorLayout(
    {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    layers="transformer.h",
)
FALCON_TWO_NORMS = replace(FALCON, in_layer={**FALCON.in_layer, "attn_norm": "ln_mlp", SECOND_NORM: "ln_attn"})
INTERNLM2 = TensorLayout(
    {**OUTSIDE_LAYERS, "token_embd": "model.tok_embeddings", "output": "output"},
    {
        "attn_norm": "attention_norm",
        "attn_output": "attention.wo",
        "ffn_norm": "ffn_norm",
        **{"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
    },
    stacked={SEPARATED: "attention.wqkv"},
)
BAICHUAN = TensorLayout(
    OUTSIDE_LAYERS,
    {**PRE_NORMS, "attn_output": "self_attn.o_proj", **MLP},
    stacked={SEPARATED: "self_attn.W_pack"},
)


def _falcon(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Falcon. llama.cpp has the models with parallel feed-forward, without biases and ALiBi.

    All of them are in the form of the new decoder, which has the same weights. The converter writes no base of the
    rotary frequencies.
    """
    shape, read = decoder_shape(file, epsilon="attention.layer_norm_epsilon"), file.read
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    for key in ("attention.key_length", "rope.dimension_count"):
        read.expect(key, (head_dim,), head_dim)
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "rope_theta")
    return {key: shape[key] for key in kept} | {
        "model_type": "falcon",
        "ffn_hidden_size": shape["intermediate_size"],
        "num_kv_heads": shape["num_key_value_heads"],
        "layer_norm_epsilon": shape["rms_norm_eps"],
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if f"blk.0.{SECOND_NORM}.weight" in file.tensors else 1,
        "rope_scaling": rope_scaling(file, head_dim),
    }


def _separated(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of a decoder with separate projections. Raises UserError for one with another number of rows."""
    shape = rotary_decoder(file)
    heads, groups, head_dim = (shape[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    num_rows = dict(zip(SEPARATED, (heads * head_dim, groups * head_dim, groups * head_dim), strict=True))
    for name, tensor in file.tensors.items():
        wanted = num_rows.get(name.removesuffix(".weight").rpartition(".")[2], tensor.shape[0])
        if tensor.shape[0] != wanted:
            raise UserError(
                f"{tensor.path}: {name} has {tensor.shape[0]} rows, expected {wanted}: convert the model again"
            )
    return shape


def _internlm2(file: GGUFMetadata) -> dict[str, Any]:
    return _separated(file) | {"model_type": "internlm2", "bias": False}


def _baichuan(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Baichuan. The vocabulary tells version 2, whose head the model normalises; llama.cpp does not."""
    shape, read = _separated(file), file.read
    heads = shape["num_attention_heads"]
    head_dim = shape["hidden_size"] // heads
    read.expect("attention.head_count_kv", (heads,), heads)
    read.expect("attention.key_length", (head_dim,), head_dim)
    num_layers = read.expect("block_count", (LAYERS_WITH_ROTATION, LAYERS_WITH_ALIBI), None)
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
    values = {key: shape[key] for key in (*kept, "rope_theta", "rope_scaling")} | {"model_type": "baichuan"}
    length = "model_max_length" if num_layers == LAYERS_WITH_ALIBI else "max_position_embeddings"
    values[length] = shape["max_position_embeddings"]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or embedding.shape[0] != BAICHUAN2_VOCABULARY:
        values["architectures"] = ["BaiChuanForCausalLM"]  # of version 1
    return values


CONFIGS: dict[str, Callable[[GGUFMetadata], dict[str, Any]]] = {
    "falcon": _falcon,
    "internlm2": _internlm2,
    "baichuan": _baichuan,
}
"""The function that returns the config's keys, by llama.cpp's architecture name."""
LAYOUTS = {"falcon": FALCON, "internlm2": INTERNLM2, "baichuan": BAICHUAN}
"""By model_type."""
