"""Read and write FP4 weights as compressed-tensors and NVIDIA's ModelOpt store them: MXFP4 and NVFP4.

O output channels, I input channels, N input channels per group. Sources: the package compressed-tensors, 0.20
(mxfp4-pack-quantized, nvfp4-pack-quantized); ModelOpt's unified Hugging Face checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.decoding import warn_once
from conf.errors import UserError
from kernels.linear.block_weight import KINDS, has_finite_factors
from quantization.layouts.base import OutputAxis, StoredWeight
from quantization.layouts.checks import of_type, positive, scalar_shape
from quantization.weight_format import QuantizedWeight

SCALE = "weight_scale"
SCALE_DTYPES = {"MXFP4": torch.uint8, "NVFP4": torch.float8_e4m3fn}
NOT_READ = "input_global_scale", "input_scale"  # of activations, which stay floats
SIGN, SIGNS = 0x80, 0x88  # of a scale; of the two codes in a byte


def warn_of_float_activations() -> None:
    warn_once(
        "the checkpoint's FP4 weights are made for quantised activations, which stay floats here: logits differ from other "
        "engines' by the rounding of activations, and FP4 hardware is not used"
    )


@dataclass(frozen=True)
class FP4Weight:
    """One weight: codes uint8 [O, I / 2], the even input in the lower half of a byte, and scales [O, I / N].

    MXFP4's scales are exponents, 2^(byte - 127). NVFP4's are float8, and a float32 of the whole weight divides them
    (compressed-tensors) or multiplies them (ModelOpt).
    """

    kind: str
    """MXFP4 or NVFP4."""
    shape: tuple[int, int]
    tensor_shapes: Mapping[str, tuple[int, ...]]
    is_modelopt: bool = False

    def __post_init__(self) -> None:
        size = KINDS[self.kind].block_size
        if self.shape[1] % size:
            raise UserError(
                f"the {self.shape[1]} input channels of a weight {list(self.shape)} in {self.kind} are not a multiple of "
                f"{size}, which is not supported"
            )

    @property
    def _codes_name(self) -> str:
        return "weight" if self.is_modelopt else "weight_packed"

    @property
    def _global_name(self) -> str:
        return "weight_scale_2" if self.is_modelopt else "weight_global_scale"

    def tensors(self) -> dict[str, tuple[int, ...]]:
        (outputs, inputs), kind = self.shape, KINDS[self.kind]
        names: dict[str, tuple[int, ...]] = {self._codes_name: (outputs, inputs // 2)}
        names[SCALE] = (outputs, inputs // kind.group_size)
        scalars = (self._global_name,) if kind.has_global_scale else ()
        not_read = [name for name in NOT_READ if name in self.tensor_shapes]
        return names | {name: scalar_shape(self.tensor_shapes, name) for name in (*scalars, *not_read)}

    def output_axes(self) -> dict[str, OutputAxis]:
        return {self._codes_name: OutputAxis(0), SCALE: OutputAxis(0)}

    def of_outputs(self, num_outputs: int) -> "FP4Weight":
        return replace(self, shape=(num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight. Raises UserError for a wrong dtype, and for scales that are not finite."""
        codes = of_type(tensors, self._codes_name, torch.uint8)
        scales = of_type(tensors, SCALE, SCALE_DTYPES[self.kind]).view(torch.uint8)
        global_scale = torch.empty(len(codes), 0)
        if KINDS[self.kind].has_global_scale:
            factor = positive(tensors[self._global_name], self._global_name).double().reshape(1, 1)
            global_scale = factor if self.is_modelopt else 1 / factor
            if (is_negative := scales >= SIGN).any():  # some tools write -0; blocks have no sign
                signs = (is_negative * SIGNS).byte().repeat_interleave(KINDS[self.kind].group_size // 2, 1)
                codes, scales = codes ^ signs, scales & ~SIGN
        blocks = _blocks_of(self.kind, codes, scales)
        if not has_finite_factors(self.kind, blocks):
            raise UserError(f"{SCALE} has values that are not numbers: the file is damaged, quantise again")
        return StoredWeight(QuantizedWeight(blocks, global_scale, blocks=self.kind))

    def write(self, stored: StoredWeight) -> dict[str, Tensor]:
        """Return the tensors that hold the weight in compressed-tensors' form."""
        assert not self.is_modelopt
        codes, scales = _codes_and_scales(self.kind, stored.weight.codes)
        tensors = {self._codes_name: codes, SCALE: scales.view(SCALE_DTYPES[self.kind])}
        if KINDS[self.kind].has_global_scale:
            tensors[self._global_name] = torch.tensor([1 / stored.weight.global_scale])
        return tensors


def _blocks_of(kind: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Return ggml's blocks uint8 [O, bytes] of codes uint8 [O, I / 2] and scales uint8 [O, I / N].

    A byte of a file holds neighbours; a byte of a block holds codes from the first and the second half of a group.
    """
    format = KINDS[kind]
    first, second = codes.unflatten(1, (-1, 2, format.group_size // 4)).unbind(
        2
    )  # [O, I / N, N / 4], two codes in a byte
    halves = torch.stack(_exchanged(first, second), 3).flatten(2)  # [O, I / N, N / 2]
    per_block = format.block_size // format.group_size
    parts = scales.unflatten(1, (-1, per_block)), halves.unflatten(1, (-1, per_block)).flatten(2)
    return torch.cat(parts, 2).flatten(1)


def _codes_and_scales(kind: str, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of `_blocks_of`."""
    format = KINDS[kind]
    per_block = format.block_size // format.group_size
    split = blocks.unflatten(1, (-1, format.block_bytes))
    scales, halves = split.split((per_block, format.block_bytes - per_block), 2)
    even, odd = halves.unflatten(2, (per_block, -1, 2)).unbind(4)  # [O, B, groups, N / 4]
    return torch.stack(_exchanged(even, odd), 3).flatten(1), scales.flatten(1)


def _exchanged(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower halves of the bytes of both, and the upper halves of both: a transposition."""
    return low & 15 | high << 4, low >> 4 | high & 0xF0
