"""The float32 factors of NVFP4 weights, which a GGUF file holds next to them: one of a tensor, or one of each expert."""

from dataclasses import replace

from conf.errors import UserError
from models.formats.gguf.header import TensorInfo

SCALED = "NVFP4"
"""The type whose tensors have factors."""


def with_scales(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors with the factors of NVFP4 weights as their `scale`, and without these factors' own tensors.

    The factors of activations are left out: activations are not rounded to FP4. Raises UserError for another shape or
    type of a factor.
    """
    result = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.type.name != SCALED:
            continue
        module = name.removesuffix(".weight")
        result.pop(f"{module}.input_scale", None)
        if scale := result.pop(f"{module}.scale", None):
            wanted = tensor.shape[:-2] or (1,)
            if scale.type.name != "F32" or scale.shape != wanted:
                raise UserError(
                    f"{scale.path}: {module}.scale is {scale.type.name} {list(scale.shape)}, expected F32 {list(wanted)}"
                )
            result[name] = replace(tensor, scale=scale)
    return result


def of_expert(tensor: TensorInfo, number: int, count: int) -> TensorInfo:
    """Return matrix `number` of the `count` equal matrices in a tensor [experts, rows, *].

    An expert has one or more of them.
    """
    experts, rows, *columns = tensor.shape
    size, scale = tensor.num_bytes // count, tensor.scale
    if scale is not None:
        scale = replace(scale, shape=(1,), offset=scale.offset + number * experts // count * 4, num_bytes=4)
    shape = rows * experts // count, *columns
    return replace(tensor, shape=shape, offset=tensor.offset + number * size, num_bytes=size, scale=scale)
