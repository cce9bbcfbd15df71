"""Adapters in PEFT's layout, written without PEFT."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.causal_lm import CausalLM
from models.linear_layers import linear_specs


def write_random_adapter(folder: Path, model: CausalLM, rank: int, seed: int, std: float) -> Path:
    """Write random bfloat16 factors for all linear layers of the decoder that can have adapters."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, spec in linear_specs(model).items():
        if name.startswith(model.layout.layers) and ".experts." not in name:
            for letter, shape in (("A", (rank, spec.shape[1])), ("B", (spec.shape[0], rank))):
                factor = torch.randn(shape, generator=generator) * std
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = factor.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder
