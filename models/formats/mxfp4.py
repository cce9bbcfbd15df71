"""Decode MXFP4, the OCP microscaling format of gpt-oss's experts: blocks of 32 numbers of 4 bits (1 sign, 2 exponent, 1
mantissa) that share a power of two.

O outputs, B blocks of an output.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError

log = logging.getLogger(__name__)

SETTINGS = ("quant_method", "modules_to_not_convert", "dequantize")  # the files say which tensors have blocks
BLOCK = 32  # numbers
NAN_SCALE, BIAS = 255, 127
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.bfloat16)


def float_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the floats that `decode` returns: without a quantization_config of MXFP4.

    Logs a warning about the memory. Raises UserError for a setting that is not known.
    """
    settings = values.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != "mxfp4":
        return values
    if unknown := [key for key in settings if key not in SETTINGS]:
        raise UserError(f"quantization_config: {unknown[0]} is not known for quant_method='mxfp4'")
    log.warning("MXFP4 experts become floats, which take 3.8 times as much memory in 16 bits")
    return {key: value for key, value in values.items() if key != "quantization_config"}


def decode(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """Return exact bfloat16 [O, B * 32].

    blocks uint8 [O, B, 16]: two numbers per byte, the first in the low bits. scales uint8 [O, B]: exponents plus 127.
    Raises UserError with `name` if a scale is NaN.
    """
    if (scales == NAN_SCALE).any():
        raise UserError(f"{name} has a scale of 255, which is NaN: its numbers are unknown")
    pairs = torch.stack((CODES.repeat(16), CODES.repeat_interleave(16)), -1)  # [256, 2]
    numbers = pairs[blocks.long()].flatten(-2).float()  # [O, B, 32]
    return torch.ldexp(numbers, (scales.int() - BIAS)[..., None]).bfloat16().flatten(1)
