"""gpt-oss's files with experts in MXFP4, and transformers' model of the same numbers."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.catalog import ROWS

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$")


def rounded(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the MXFP4 numbers nearest to x [..., I], their blocks [..., I / 32, 16] and their scales [..., I / 32]."""
    grouped = x.double().unflatten(-1, (-1, 32))
    exponents = (grouped.abs().amax(-1) / 6).log2().ceil()
    table = torch.tensor(VALUES + [-value for value in VALUES], dtype=torch.float64)
    codes = (grouped[..., None] / 2 ** exponents[..., None, None] - table).abs().argmin(-1)
    numbers = (table[codes] * 2 ** exponents[..., None]).flatten(-2)
    return numbers.float(), (codes[..., ::2] + 16 * codes[..., 1::2]).byte(), (exponents + 127).byte()


def write_mxfp4(folder: Path) -> Any:
    """Write a model with experts in MXFP4. Return transformers' model of it."""
    model = ROWS["gpt_oss"].write(folder, intermediate_size=96)
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if EXPERTS.search(name)]:
        numbers, blocks, scales = rounded(tensors.pop(name).mT)
        model.get_parameter(name).data.copy_(numbers.mT)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    set_quantization(folder, quant_method="mxfp4", modules_to_not_convert=skipped)
    return model


def set_quantization(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
