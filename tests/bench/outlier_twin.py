"""Write a checkpoint that computes the same as another one, but has outlier activations: `python
tests/bench/outlier_twin.py MODEL OUTPUT`.

Some channels of every norm before linear layers are scaled up, and the columns that read them are scaled down, by
powers of two. Every product stays the same. For models with Llama's tensor names, in safetensors.
"""

import argparse
import random
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Scaling by 1 / 2^e is exact for float16 numbers that are not tiny, and so is a sum of equally scaled products.
FACTORS = (32, 64)
SHARE = 50  # one channel in this number, at least one
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def write_outlier_twin(model: Path, output: Path, seed: int = 0) -> None:
    """Raises ValueError if a tensor cannot be scaled exactly, or if no norm is found."""
    files = {output / path.name: load_file(path) for path in sorted(model.glob("*.safetensors"))}
    holders = {name: tensors for tensors in files.values() for name in tensors}
    norms = [
        f"{layer}.{norm}.weight"
        for layer in sorted({name.removesuffix(".mlp.up_proj.weight") for name in holders if "mlp.up_proj" in name})
        for norm in READERS
    ]
    if not norms:
        raise ValueError(f"{model} has no tensors named as Llama's norms are")
    chosen = random.Random(seed)
    for name in norms:
        layer, norm, _ = name.rsplit(".", 2)
        factors = torch.ones(len(holders[name][name]))
        for channel in chosen.sample(range(len(factors)), max(1, len(factors) // SHARE)):
            factors[channel] = chosen.choice(FACTORS)
        _multiply(holders[name], name, factors)
        for reader in READERS[norm]:
            column = f"{layer}.{reader}.weight"  # [O, I]
            _multiply(holders[column], column, 1 / factors)
    shutil.copytree(model, output)
    for path, tensors in files.items():
        save_file(tensors, path, {"format": "pt"})


def _multiply(tensors: dict[str, torch.Tensor], name: str, factors: torch.Tensor) -> None:
    scaled = (tensors[name].float() * factors).to(tensors[name].dtype)
    if not (scaled.float() / factors).equal(tensors[name].float()):
        raise ValueError(f"{name} cannot be scaled exactly in {scaled.dtype}")
    tensors[name] = scaled


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    try:
        write_outlier_twin(options.model, options.output)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
