"""GPTQ from a Hessian."""

from torch import Tensor

from quantization.gptq import gptq
from quantization.hessian import Hessian, inverse_factor
from quantization.weight_format import QuantizedWeight, WeightFormat


def hessian_of(x: Tensor) -> Tensor:
    hessian = Hessian(x.shape[1])
    hessian.add(x)
    return hessian.mean()


def rounded_by_gptq(
    weight: Tensor,
    hessian: Tensor,
    format: WeightFormat,
    damping: float = 0.01,
    act_order: bool = True,
    static_groups: bool = True,
    kept: Tensor | None = None,
) -> QuantizedWeight:
    return gptq(weight, inverse_factor(hessian, damping, act_order), format, static_groups, kept)
