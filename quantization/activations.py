"""placeholder"""

from torch import Tensor

from quantization.codes import FP8_MAX, CodeKind, scale_of, to_fp8, to_int8


def quantize_static(x: Tensor, scale: Tensor, kind: CodeKind) -> Tensor:
    ratio = x.float() / scale
    return to_fp8(ratio) if kind is CodeKind.FP8 else to_int8(ratio, -127)


def quantize_per_token(x: Tensor, kind: CodeKind) -> tuple[Tensor, Tensor]:
    scale = scale_of(x.abs().amax(-1, keepdim=True), FP8_MAX if kind is CodeKind.FP8 else 127)
    return quantize_static(x, scale, kind), scale
