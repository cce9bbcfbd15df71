"""M rows, K inputs."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.kv_format import FLOAT8_MAX, INT8_MAX


def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.int8, group_size: int | None = None, static_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of every row, or of every group of its inputs. scale = max |x| / the largest code (1 if
    that is 0); code = x / scale, rounded half to even.

    x [M, K] of any float dtype. Codes [M, K] are int8 up to 127 or float8_e4m3fn up to 448. Scales are float32 [M, 1]
    or [M, ceil(K / group_size)], NaN where x is not finite. If `static_scales` (float32, one per row or one for all
    rows) are given, they are the scales, and codes saturate.
    """
    size = min(group_size or x.shape[1], x.shape[1])
    largest = FLOAT8_MAX if dtype.is_floating_point else INT8_MAX
    groups = functional.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))  # [M, G, size]
    scales = groups.abs().amax(2) / largest  # [M, G]
    finite_scales = (
        torch.where(scales == 0, 1.0, scales)
        if static_scales is None
        else static_scales.reshape(-1, 1).expand_as(scales)
    )
    scales = torch.where(scales.isfinite(), finite_scales, torch.nan)
    codes = (groups / scales[:, :, None]).nan_to_num()
    codes = codes if dtype.is_floating_point else codes.round()
    codes = codes.clamp(-largest - (not dtype.is_floating_point), largest)  # the conversion alone does not saturate
    return codes.to(dtype).flatten(1)[:, : x.shape[1]], scales
