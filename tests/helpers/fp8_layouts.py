"""The layout of float8 weights with a scale per block or per layer."""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SMALL_BLOCKS = BLOCKS | {"weight_block_size": [48, 32]}
INPUT_SCALE = 0.02  # activations of these models reach about 9


def encode_blocks(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return codes [O, I] and scales [ceil(O / rows), ceil(I / columns)], computed block by block."""
    outputs, inputs = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-outputs // rows), -(-inputs // columns))
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            block = slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns)
            scales[r, c] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[r, c]).to(torch.float8_e4m3fn)
    return codes, scales


def encode(config: dict[str, Any], weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    block = config.get("weight_block_size")
    codes, scales = encode_blocks(weight, *(block or weight.shape))
    block = block and [min(size, 2**20) for size in block]  # transformers makes a row of scales for each row of a block
    dequantised = _dequantize_fp8_weight(codes, scales if block else scales[0, 0], block, torch.float32)
    tensors = {"weight": codes, "weight_scale_inv" if block else "weight_scale": scales if block else scales[0, 0]}
    if config["activation_scheme"] == "static":
        tensors["input_scale"] = torch.tensor(INPUT_SCALE)
    return tensors, dequantised
