"""AWQ (arXiv 2306.00978): scale up salient input channels before rounding, and clip weights if that reduces the error.

T tokens, O output channels, I input channels of linear layers that share their input.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from conf.errors import check
from kernels.threads import map_in_threads
from quantization.activations import check_activations
from quantization.fold import multiply_inputs
from quantization.weight_format import WeightFormat, choose_scales, quantize

NUM_RATIOS = 20  # exponents 0, 1/20 .. 19/20
# Outputs of a layer on which the ratios are compared. A layer of 11,008 outputs takes 11 times as long with all of them.
NUM_OUTPUTS = 1024
NUM_CLIPS = 10  # ranges shrunk by 0, 1/20 .. 9/20
LEAST_MEAN = 1e-4  # share of the largest mean; keeps some precision for channels that calibration hardly activates


def search_scales(weights: Sequence[Tensor], x: Tensor, format: WeightFormat) -> Tensor:
    """Return scales [I] float32.

    The input is divided by them, and the weights' columns are multiplied, before quantisation.

    weights: [O, I] of each layer that shares the input. x: a sample of that input [T, I]. The scales are mean(abs(x))
    ** ratio, normalised by sqrt(max * min). The ratio has the least squared error over about NUM_OUTPUTS outputs of each
    layer; ratio 0 means no scaling. Raises UserError as choose_scales and check_activations do.
    """
    check_activations(len(x), x)
    for weight in weights:  # whole, because an error names the layer's shape
        choose_scales(weight, format)
    sampled = [weight[:: -(-len(weight) // NUM_OUTPUTS)].float() for weight in weights]
    mean = x.float().abs().mean(0)
    mean = (mean / mean.max().clamp_min(torch.finfo(torch.float32).tiny)).clamp_min(LEAST_MEAN)

    def scales_of(step: int) -> Tensor:
        scales = mean ** (step / NUM_RATIOS)
        return scales / (scales.max() * scales.min()).sqrt()

    def error_of(step: int) -> float:
        scales, error = scales_of(step), 0.0
        for weight in sampled:
            quantized = quantize(multiply_inputs(weight, scales), format).dequantize() / scales
            error += float(_errors(weight, quantized, x).square().sum())
        return error

    errors = map_in_threads(error_of, range(NUM_RATIOS))
    return scales_of(errors.index(min(errors)))


def search_clip(weight: Tensor, x: Tensor, format: WeightFormat) -> Tensor:
    """Return weight [O, I] with each group (or row) clipped to a share of its absmax, 1 to 11/20.

    The share has the least squared output error. x: a sample of the layer's input [T, I]. The error of a group counts
    only the group's own part of the output. Raises UserError for a scale per tensor, and as choose_scales and
    check_activations do.
    """
    check(not format.per_tensor, "auto_clip", True, "false where scales are per tensor")
    check_activations(len(x), x)
    # Check the whole weight: for a single group, the error could not name the layer's shape.
    choose_scales(weight, format)
    size = format.group_size or weight.shape[1]
    row = replace(format, group_size=None)
    parts = zip(weight.split(size, 1), x.split(size, 1), strict=True)
    return torch.cat([_clip_rows(part, inputs, row) for part, inputs in parts], 1)


def _clip_rows(weight: Tensor, x: Tensor, format: WeightFormat) -> Tensor:
    absmax = weight.abs().amax(1, keepdim=True)
    best = weight
    least = torch.full_like(absmax, float("inf"), dtype=torch.float32)  # [O, 1]
    for step in range(NUM_CLIPS):
        limit = absmax * (1 - step / 20)
        clipped = weight.clamp(-limit, limit)
        error = _errors(weight, quantize(clipped, format).dequantize(), x).square().sum(0).unsqueeze(1)
        best = torch.where(error < least, clipped, best)
        least = torch.minimum(error, least)
    return best


def _errors(weight: Tensor, quantized: Tensor, x: Tensor) -> Tensor:
    return x.float() @ (weight.float() - quantized).T
