"""Tied models whose files contain a separate head."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import (
    BloomForCausalLM,
    Gemma2ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    OPTForCausalLM,
    Phi3ForCausalLM,
)

from tests.helpers.oracle import write_model

TIED_MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "gemma2": (Gemma2ForCausalLM, {"head_dim": 16}),
    "phi3": (Phi3ForCausalLM, {"pad_token_id": 0}),
    "gpt2": (GPT2LMHeadModel, {"n_embd": 64, "n_head": 4, "n_layer": 2}),
    "opt": (OPTForCausalLM, {"word_embed_proj_dim": 64, "ffn_dim": 64}),
    "bloom": (BloomForCausalLM, {"n_head": 4, "n_layer": 2}),
}


def store_head(folder: Path, scale: float) -> None:
    """Add a head to a tied model's file: its embedding times a number."""
    tensors = load_file(folder / "model.safetensors")
    embedding = next(tensor for name, tensor in tensors.items() if tensor.shape == (96, 64) and "pos" not in name)
    save_file(
        tensors | {"lm_head.weight": (embedding * scale).contiguous()}, folder / "model.safetensors", {"format": "pt"}
    )


def tied(folder: Path, name: str = "llama", scale: float = 1.5) -> Path:
    model_class, config = TIED_MODELS[name]
    write_model(folder, model_class, tie_word_embeddings=True, **config)
    store_head(folder, scale)
    return folder
