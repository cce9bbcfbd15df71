"""The codes of one linear layer, chosen by the method of the settings, and their errors on calibration samples.

O output channels, I input channels.
"""

from dataclasses import replace

import torch
from torch import Tensor

from conf.quantization import Activations, QuantConfig, QuantMethod
from quantization.activations import quantize_per_token, quantize_static
from quantization.awq import search_clip
from quantization.calibration import ActivationStats
from quantization.gptq import gptq
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, choose_scales, encode, quantize

REPORTED = 128  # tokens, and outputs of a layer, on which reported errors are measured


def choose_codes(
    config: QuantConfig, weight: Tensor, group: ActivationStats | None, scheme: LinearScheme, is_pruned: bool
) -> tuple[QuantizedWeight, str]:
    """Return the codes of weight [O, I], and a note. The zeros of a pruned weight stay.

    `group`: the statistics of the layer's input; None if no token reached the layer.
    """
    if group is None:
        return quantize(weight, scheme.weights), "no calibration token came here: rounded to nearest"
    if config.method is QuantMethod.gptq:
        assert group.hessian is not None
        damping = config.gptq.damping
        factor = group.hessian.inverse_factor(damping, config.gptq.act_order)
        kept = weight != 0 if is_pruned else None
        chosen = gptq(weight, factor, scheme.weights, config.gptq.static_groups, kept)
        return chosen, f"damping raised to {factor.damping:g}" if factor.damping > damping else ""
    if config.auto_clip:
        weight = search_clip(weight, group.sample, scheme.weights)
    return quantize(weight, scheme.weights), ""


def input_scale(group: ActivationStats | None, groups: list[ActivationStats], scheme: LinearScheme) -> Tensor | None:
    """Return the static scale of a layer's input. If no token reached it, return the largest scale in `groups`."""
    if scheme.activations is not Activations.static:
        return None
    reaching = [group] if group else groups
    return (
        torch.stack([group.static_scale(scheme.weights.kind) for group in reaching]).amax()
        if reaching
        else torch.ones(())
    )


def sampled(tensor: Tensor) -> Tensor:
    """Return about REPORTED rows of a tensor: tokens, or outputs."""
    return tensor[:: max(1, -(-len(tensor) // REPORTED))]


def _sampled_weight(weight: QuantizedWeight) -> QuantizedWeight:
    scales = weight.scales if len(weight.scales) == 1 else sampled(weight.scales)
    zero_points = None if weight.zero_points is None else sampled(weight.zero_points)
    return replace(weight, codes=sampled(weight.codes), scales=scales, zero_points=zero_points)


def rounded_error(weight: Tensor, scheme: LinearScheme, group: ActivationStats) -> float:
    """Return the relative error of weight [O, I] rounded to nearest, on a sample of tokens and outputs."""
    rows, format = sampled(weight), scheme.weights
    if format.kind.is_blocks:
        return _error(weight, _sampled_weight(quantize(weight, format)), scheme, group)
    scales, zero_points = choose_scales(weight if format.per_tensor else rows, format)
    return _error(
        weight, QuantizedWeight(encode(rows, scales, zero_points, format), scales, zero_points), scheme, group
    )


def output_error(weight: Tensor, chosen: QuantizedWeight, scheme: LinearScheme, group: ActivationStats) -> float:
    """Return the relative error of the chosen codes of weight [O, I], on a sample of tokens and outputs."""
    return _error(weight, _sampled_weight(chosen), scheme, group)


def _error(weight: Tensor, codes: QuantizedWeight, scheme: LinearScheme, group: ActivationStats) -> float:
    """Return the relative error of x W^T from quantised weights and activations, on a sample of tokens and outputs.

    weight: [O, I]. codes: of its sampled outputs.
    """
    x, kind = sampled(group.sample), scheme.weights.kind
    outputs = x @ sampled(weight).T
    if scheme.activations is Activations.static:
        scale = group.static_scale(kind)
        x = quantize_static(x, scale, kind).float() * scale
    elif scheme.activations is Activations.dynamic:
        rows, scales = quantize_per_token(x, kind)
        x = rows.float() * scales
    return relative_error(x @ codes.dequantize().T, outputs)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
