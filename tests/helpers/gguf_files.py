"""GGUF twins of checkpoints in Hugging Face's layout, written with the gguf package alone, like llama.cpp's
converter."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from models.formats import open_checkpoint
from models.formats.base import Checkpoint

TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}


def llama_cpp_tensors(folder: Path, permuted: bool = True, merged: bool = True) -> dict[str, np.ndarray]:
    """Return float32 arrays by llama.cpp's names. Experts are one tensor, or one tensor each as before April 2024."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        module, _, leaf = name.rpartition(".")
        array, parts = tensor.float().numpy(), module.split(".")
        if permuted and parts[-1] in heads:
            n = heads[parts[-1]]
            array = array.reshape(n, 2, array.shape[0] // n // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if module in TOP:
            tensors[f"{TOP[module]}.{leaf}"] = array
        elif "experts" in parts and merged:
            experts.setdefault(f"blk.{parts[2]}.{EXPERT[parts[-1]]}_exps.{leaf}", {})[int(parts[-2])] = array
        elif "experts" in parts:
            tensors[f"blk.{parts[2]}.{EXPERT[parts[-1]]}.{parts[-2]}.{leaf}"] = array
        else:
            tensors[f"blk.{parts[2]}.{BLOCK['.'.join(parts[3:])]}.{leaf}"] = array
    return tensors | {name: np.stack([arrays[i] for i in sorted(arrays)]) for name, arrays in experts.items()}


def add_shape(writer: gguf.GGUFWriter, folder: Path) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if head_dim * config["num_attention_heads"] != config["hidden_size"]:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.get("sliding_window") and config["model_type"] != "qwen2":
        writer.add_sliding_window(config["sliding_window"])
    if config.get("num_local_experts"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tensors(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray], kind: str) -> None:
    """Write vectors and routers as float32, and all other tensors as `kind`, a ggml type name."""
    for name, array in tensors.items():
        wanted = "F32" if array.ndim == 1 or "ffn_gate_inp" in name else kind
        type = gguf.GGMLQuantizationType[wanted]
        writer.add_tensor(name, gguf.quants.quantize(array, type), raw_dtype=type)
    finish(writer)


FACTORS = {
    "Q4_0": ((0,), 0.02),
    "Q4_1": ((0, 2), 0.02),
    "Q5_0": ((0,), 0.01),
    "Q5_1": ((0, 2), 0.01),
    "Q8_0": ((0,), 1e-3),
    "IQ4_NL": ((0,), 1e-3),
    "IQ4_XS": ((0,), 4e-5),
    "Q3_K": ((108,), 1.5e-3),
    "Q4_K": ((0, 2), 3e-4),
    "Q5_K": ((0, 2), 2e-4),
    "Q6_K": ((208,), 5e-5),
}
"""For each type: the position of the float16 factors in a block, and the largest factor."""
SCALE_BYTES = {"MXFP4": (1, 118, 123), "NVFP4": (4, 1, 16)}
"""For types with scales of eight bits: how many bytes begin a block, and their range. NVFP4's includes denormals."""


def random_blocks(kind: str, num_outputs: int, num_inputs: int, seed: int) -> np.ndarray:
    """Return rows uint8 [outputs, bytes] of random codes and scales, because the package has no writer for these types.

    Values are of the order 0.1. As in llama.cpp's own files, every seventh block is zero, and factors without a second
    factor have either sign.
    """
    type = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[type]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_outputs, num_inputs // block, block_bytes), np.uint8)
    if kind in SCALE_BYTES:
        count, least, most = SCALE_BYTES[kind]
        blocks[:, :, :count] = generator.integers(least, most, (*blocks.shape[:2], count), np.uint8)
        blocks.reshape(-1, block_bytes)[6::7, :count] = 0
        return blocks.reshape(num_outputs, -1)
    places, largest = FACTORS[kind]
    for place in places:
        halves = generator.uniform(largest / 4, largest, blocks.shape[:2]).astype(np.float16)
        if len(places) == 1:
            halves *= generator.choice([-1, 1], halves.shape).astype(np.float16)
        halves.flat[6::7] = 0
        blocks[:, :, place : place + 2] = halves[:, :, None].view(np.uint8)
    return blocks.reshape(num_outputs, -1)


def write_random_llama(file: Path, folder: Path, kind: str) -> None:
    """Write a Llama with the config.json of a folder. Its matrices are random blocks, its norms ones."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "attn_q": hidden,
        "attn_k": keys,
        "attn_v": keys,
        "attn_output": hidden,
        "ffn_gate": inner,
        "ffn_up": inner,
    }
    writer = gguf.GGUFWriter(file, "llama")
    add_shape(writer, folder)
    matrices = {"token_embd": (vocab, hidden), "output": (vocab, hidden)}
    norms = ["output_norm"]
    for i in range(config["num_hidden_layers"]):
        matrices |= {f"blk.{i}.{name}": (outputs, hidden) for name, outputs in layer.items()}
        matrices[f"blk.{i}.ffn_down"] = hidden, inner
        norms += [f"blk.{i}.attn_norm", f"blk.{i}.ffn_norm"]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    for seed, (name, shape) in enumerate(matrices.items()):
        writer.add_tensor(
            f"{name}.weight", random_blocks(kind, *shape, seed), raw_dtype=gguf.GGMLQuantizationType[kind]
        )
    finish(writer)


def write_twin(folder: Path, file: Path, kind: str = "F32", merged: bool = True, **metadata: Any) -> Path:
    """Write the GGUF twin of a folder. `metadata`: further keys, with double underscores for dots."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    architecture = "qwen2" if model_type == "qwen2" else "llama"
    writer = gguf.GGUFWriter(file, architecture)
    add_shape(writer, folder)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    write_tensors(writer, llama_cpp_tensors(folder, architecture == "llama", merged), kind)
    return file


def write_changed(source: Path, target: Path, name: str, change: Any) -> None:
    """Write a GGUF file with another tensor or key `name`, a new key, or without it if `change` is None."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    changed_key = f"{architecture}.{name}"
    for key, field in reader.fields.items():
        value = change if key == changed_key else field.contents()
        if value is not None and not key.startswith(("GGUF.", "general.architecture")):
            writer.add_array(key, value) if isinstance(value, list) else writer.add_key_value(
                key, value, field.types[-1]
            )
    if changed_key not in reader.fields and name not in {tensor.name for tensor in reader.tensors}:
        writer.add_key_value(changed_key, change, gguf.GGUFValueType.get_type(change))
    for tensor in reader.tensors:
        if tensor.name != name:
            writer.add_tensor(tensor.name, tensor.data)
        elif change is not None:
            writer.add_tensor(name, np.ascontiguousarray(change(tensor.data)))
    finish(writer)


def pack(*fields: Any) -> bytes:
    """Return header bytes: texts with their lengths, (format, number) pairs, and bytes unchanged."""
    import struct

    return b"".join(
        field
        if isinstance(field, bytes)
        else struct.pack("<Q", len(field.encode())) + field.encode()
        if isinstance(field, str)
        else struct.pack(*field)
        for field in fields
    )


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(path, allow_pickle=False)
