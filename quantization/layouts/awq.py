"""Read and write AutoAWQ's GEMM layout: 4-bit weights with eight output channels in an int32 word.

O output channels, I input channels, G groups of input channels. Source: AutoAWQ 0.2, utils/packing_utils.py,
modules/linear/gemm.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations
from models.config import ConfigReader
from models.linear_layers import LinearSpec
from quantization.codes import CodeKind
from quantization.layouts.base import OutputAxis, StoredWeight, holds_codes
from quantization.layouts.checks import as_float16, check_autoround, divided, finite, of_type
from quantization.layouts.packing import pack, unpack
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat

METHOD = "awq"
# The output channel, of eight, in each 4 bits of a word. The lowest bits come first.
ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
# Keys that are read and ignored. The tensors show which layers are floats; the other keys are about calibration and
# kernels.
NO_EFFECT = """
    quant_method modules_to_not_convert do_fuse fuse_max_seq_len modules_to_fuse exllama_config backend meta method lm_head sym desc_act
""".split()


@dataclass(frozen=True)
class Awq:
    """The `quantization_config` of an AWQ checkpoint."""

    format: WeightFormat

    def scheme(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        return LinearScheme(self.format) if holds_codes(tensor_shapes) else None

    def layout(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> "AwqWeight":
        return AwqWeight(
            layer.shape, self.format, has_zero_points=not self.format.symmetric or "qzeros" in tensor_shapes
        )


def read_awq(config: ConfigReader) -> Awq:
    """Read the `quantization_config`.

    Raises UserError for layouts of other kernels (gemv, gemv_fast, marlin ...) and for other bit widths.
    """
    version = config.get("version", str, "gemm").lower()
    if version != "gemm":
        raise UserError(f"quantization_config: version={version!r} of AWQ is not supported: only 'gemm'")
    for key in ("format", "checkpoint_format"):
        config.expect(key, (None, "gemm"), None)
    config.expect("pack_dtype", ("int32",), "int32")
    bits = config.expect("bits" if config.raw("bits") is not None else "w_bit", (4,), None)
    size_key = "group_size" if config.raw("group_size") is not None else "q_group_size"
    group_size = None if config.raw(size_key) == -1 else config.count(size_key)
    symmetric = not config.get("zero_point", bool, True)
    for key in NO_EFFECT:
        config.raw(key)
    check_autoround(config)
    config.expect("extra_config", (None, {}), None)
    return Awq(WeightFormat(bits, symmetric=symmetric, group_size=group_size))


def write_config(schemes: dict[str, LinearScheme], float_layers: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` for `schemes`, which maps layer names to schemes.

    `float_layers` are the linear layers that stay floats. Raises UserError for weights other than int4, quantised activations,
    several schemes and a quantised head: the layout has none of them.
    """
    if len(set(schemes.values())) > 1:
        named = ", ".join(sorted(set(map(str, schemes.values()))))
        problem = f"AWQ holds one scheme for all layers, not several ({named})"
        raise UserError(f"{problem}: give quantize.format=compressed_tensors")
    scheme = next(iter(schemes.values()))
    if (
        scheme.weights.kind is not CodeKind.INT
        or scheme.weights.bits != 4
        or scheme.activations is not Activations.none
    ):
        raise UserError(f"AWQ holds int4 weights, not {scheme}: give quantize.format=compressed_tensors")
    if "lm_head" in schemes:
        raise UserError("AWQ has no quantised head: give quant.skip=[lm_head]")
    return {
        "quant_method": METHOD,
        "version": "gemm",
        "bits": 4,
        "group_size": scheme.weights.group_size or -1,
        "zero_point": not scheme.weights.symmetric,
        "modules_to_not_convert": float_layers,
    }


@dataclass(frozen=True)
class AwqWeight:
    """One weight: qweight int32 [I, O / 8], qzeros int32 [G, O / 8], scales float16 [G, O].

    Symmetric codes have zero points of 8, or no qzeros.
    """

    shape: tuple[int, int]
    format: WeightFormat
    has_zero_points: bool = True

    def __post_init__(self) -> None:
        divided(self.shape, self.format.group_size)
        if self.shape[0] % len(ORDER):
            raise UserError(
                f"AWQ packs 8 output channels, which do not divide a weight {list(self.shape)}: skip this layer"
            )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        outputs, inputs = self.shape
        groups = divided(self.shape, self.format.group_size)
        names: dict[str, tuple[int, ...]] = {"qweight": (inputs, outputs // 8), "scales": (groups, outputs)}
        return names | ({"qzeros": (groups, outputs // 8)} if self.has_zero_points else {})

    def output_axes(self) -> dict[str, OutputAxis]:
        words = OutputAxis(1, len(ORDER))
        axes = {"qweight": words, "scales": OutputAxis(1)}
        return axes | ({"qzeros": words} if self.has_zero_points else {})

    def of_outputs(self, num_outputs: int) -> "AwqWeight":
        return replace(self, shape=(num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight.

        Raises UserError for a wrong dtype, for scales that are not finite, and for zero points that contradict the
        config.
        """
        scales = finite(tensors["scales"], "scales").T.contiguous()  # [O, G]
        codes = _unpack(of_type(tensors, "qweight", torch.int32))
        zero_points = _unpack(of_type(tensors, "qzeros", torch.int32)) if self.has_zero_points else None
        if not self.format.symmetric:
            assert zero_points is not None
            return StoredWeight(QuantizedWeight(codes + 8, scales, zero_points + 8))
        if zero_points is not None and zero_points.any():
            raise UserError("qzeros has zero points other than 8, but the config says zero_point=false")
        return StoredWeight(QuantizedWeight(codes, scales))

    def write(self, stored: StoredWeight) -> dict[str, Tensor]:
        """Return the tensors. Symmetric weights get zero points too, because some tools always read them.

        Raises UserError for scales that float16 cannot hold, and for a permuted weight.
        """
        weight = stored.weight
        if weight.permutation is not None:
            raise UserError("AWQ holds input channels in their own order: give quant.gptq.static_groups=true")
        zero_points = torch.zeros_like(weight.scales, dtype=torch.int8)
        middle = 0 if weight.zero_points is None else 8
        if weight.zero_points is not None:
            zero_points = weight.zero_points - middle
        return {
            "qweight": _pack(weight.codes - middle),
            "qzeros": _pack(zero_points),
            "scales": as_float16(weight.scales).T.contiguous(),
        }


def _pack(codes: Tensor) -> Tensor:
    """Pack codes int8 [O, C] in -8..7 into int32 [C, O / 8]."""
    return pack(codes.T.unflatten(1, (-1, len(ORDER)))[:, :, ORDER].flatten(1), 4)


def _unpack(words: Tensor) -> Tensor:
    codes = unpack(words, 4, words.shape[1] * len(ORDER)).unflatten(1, (-1, len(ORDER)))
    in_order: Tensor = codes[:, :, ORDER.argsort()].flatten(1)  # [C, O]
    return in_order.T.contiguous()
