"""Quantised GGUF files, and files with their dequantised weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM

from tests.helpers.gguf_files import add_shape, finish, llama_cpp_tensors, random_blocks, write_twin
from tests.helpers.oracle import write_model

TYPES = {"Q8_0": gguf.GGMLQuantizationType.Q8_0, "Q4_0": gguf.GGMLQuantizationType.Q4_0}
TWINS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "llama_tied": (LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2": (Qwen2ForCausalLM, {}),
}


def rounded(tensor: Tensor, kind: str) -> Tensor:
    """Return the weight quantised and dequantised by the package, with Hugging Face's row order."""
    type = TYPES[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), type), type).copy())


def write_pair(folder: Path, family: str, kind: str) -> tuple[Path, Path]:
    """Write a GGUF file, and a folder with its dequantised weights. A group of zeros has a scale of 0."""
    model_class, config = TWINS[family]
    write_model(folder, model_class, intermediate_size=96, **config)
    tensors = load_file(folder / "model.safetensors")
    next(tensor for name, tensor in tensors.items() if "down_proj" in name or "w2" in name)[3, 32:64] = 0
    save_file(tensors, folder / "model.safetensors")
    file = write_twin(folder, folder / "twin.gguf", kind)
    matrices = {name for name, tensor in tensors.items() if tensor.ndim == 2 and not name.endswith(".gate.weight")}
    save_file(
        {name: rounded(tensor, kind) if name in matrices else tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return file, folder


BLOCK_KINDS = {  # mixed as in Q4_K_M: within q/k/v and within experts, and with a type of each of the four kinds
    "attn_q": "Q4_K",
    "attn_k": "Q4_1",
    "attn_v": "Q6_K",
    "attn_output": "Q5_0",
    "ffn_gate": "Q5_K",
    "ffn_up": "Q5_K",
    "ffn_down": "Q6_K",
    "ffn_gate_exps": "Q4_K",
    "ffn_up_exps": "Q4_K",
    "ffn_down_exps": "Q5_1",
    "token_embd": "Q6_K",
    "output": "Q3_K",
}


FP4_KINDS = {name: "NVFP4" if "down" in name or name == "attn_q" else "MXFP4" for name in BLOCK_KINDS}


def write_blocks(folder: Path, family: str, kinds: dict[str, str] = BLOCK_KINDS) -> tuple[Path, Path]:
    """Write a GGUF file of random blocks, and a GGUF file of the package's dequantised floats.

    NVFP4 weights have factors, powers of two: the package's floats times them are not rounded.
    """
    model_class, config = TWINS[family]
    write_model(folder, model_class, hidden_size=256, intermediate_size=512, head_dim=64, **config)
    architecture = "qwen2" if family == "qwen2" else "llama"
    packed, floats = (gguf.GGUFWriter(folder / name, architecture) for name in ("packed.gguf", "floats.gguf"))
    for writer in (packed, floats):
        add_shape(writer, folder)
    for i, (name, array) in enumerate(llama_cpp_tensors(folder, architecture == "llama").items()):
        kind = kinds.get(name.split(".")[-2]) if array.ndim > 1 else None
        if kind is None:
            packed.add_tensor(name, array)
            floats.add_tensor(name, array)
            continue
        type = gguf.GGMLQuantizationType[kind]
        raw = random_blocks(kind, int(np.prod(array.shape[:-1])), array.shape[-1], seed=i)
        packed.add_tensor(name, raw.reshape(*array.shape[:-1], -1), raw_dtype=type)
        values = np.array(gguf.quants.dequantize(raw, type)).reshape(array.shape)
        if kind == "NVFP4":
            factors = 2.0 ** -np.arange(1, 1 + (array.shape[0] if array.ndim == 3 else 1), dtype=np.float32)
            for leaf in ("scale", "input_scale"):
                packed.add_tensor(name.replace(".weight", f".{leaf}"), factors)
            values *= factors.reshape(-1, *[1] * (array.ndim - 1))
        floats.add_tensor(name, values)
    for writer in (packed, floats):
        finish(writer)
    return folder / "packed.gguf", folder / "floats.gguf"
