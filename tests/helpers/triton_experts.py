"""Mixtures of quantised experts on a GPU."""

import torch
from torch import Tensor

from kernels.linear.block_weight import read_blocks
from kernels.linear.gpu_weight import GPUWeight, pack, pack_fp4, stack
from kernels.moe import reference, route, triton
from tests.helpers.gguf_files import random_blocks
from tests.helpers.triton_cases import DEVICE, EXPERT_FORMATS, FP8, assert_near, noise
from tests.helpers.triton_products import on_device, random_codes, values


def make_experts(
    count: int, outputs: int, inputs: int, kind: str, idle: set[int] = frozenset()
) -> tuple[GPUWeight, Tensor]:
    """Return random codes of each expert that is not idle, and their float64 values [count, outputs, inputs]."""
    bits, dtype, group_size, has_zeros, _ = EXPERT_FORMATS[kind]
    group = group_size or inputs
    weights, wholes = [], []
    for number in range(count):
        if kind in ("mxfp4", "nvfp4"):
            blocks = torch.from_numpy(random_blocks(kind.upper(), outputs, inputs, seed=number))
            weights.append(pack_fp4(kind.upper(), blocks, global_scale := 0.1 + number))
            wholes.append(read_blocks(kind.upper(), blocks, global_scale).dequantize().double())
            if number in idle:  # bytes of NaN
                for part in weights[-1].tensors.values():
                    part.fill_(255 if part.dtype == torch.uint8 else torch.nan)
            continue
        codes = random_codes(outputs, inputs, bits, has_zeros).roll(number, 0)
        codes = (codes.float() / 4).to(FP8) if dtype == FP8 else codes
        scales = noise(outputs, -(-inputs // group), seed=number).abs() + 0.1
        scales = scales[::128].repeat_interleave(128, 0)[:outputs] if kind == "fp8 blocks" else scales
        zeros = (codes[:, ::group] + 3).clamp(0, 15) if has_zeros else None
        wholes.append(values(codes, scales, zeros, group))
        packed = pack(codes, scales, zeros, bits)
        if number in idle:
            packed.scales.fill_(torch.nan)
        weights.append(packed)
    return on_device(stack(weights)), torch.stack(wholes)


def check_mixture(
    kind: str, chosen: Tensor, experts: int, size: int, channels: int, dtype: torch.dtype = torch.float32
) -> None:
    idle = set(range(experts)) - set(chosen.flatten().tolist())
    both = idle | {experts + number for number in idle}
    gate_up, gate_up_values = make_experts(2 * experts, channels, size, kind, both)
    down, down_values = make_experts(experts, size, channels, kind, idle)
    x = noise(len(chosen), size, dtype=dtype)
    weights = noise(*chosen.shape, seed=1).softmax(-1)
    rows = EXPERT_FORMATS[kind][-1]
    expected = reference.mixture(x.double(), gate_up_values, down_values, weights, chosen, rows, rows)
    result = triton.mixture(x.to(DEVICE), gate_up, down, weights.to(DEVICE), chosen.to(DEVICE), rows, rows)
    assert result.dtype == dtype
    # A value between two codes may round to either: int8 codes are 1/127 apart, float8 codes 1/16, and 40 or more are
    # added. bfloat16 values are rounded before and are between two codes more often: 0.8 % and 1.3 % were measured.
    tolerances = {(torch.int8, torch.float32): 2e-3, (FP8, torch.float32): 1e-2, (FP8, torch.bfloat16): 3e-2}
    tolerance = None if rows is None else tolerances.get((rows.dtype, dtype))
    assert_near(result, expected, tolerance)


def choose(tokens: int, experts: int, per_token: int) -> Tensor:
    return route(noise(tokens, experts, seed=1), per_token, True)[1]
