"""Read and write the compressed-tensors layout, which vLLM and transformers load.

O output channels, I input channels, G groups of input channels. Source: the package compressed-tensors, 0.20.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations, KVCacheFormat, SparsityPattern
from kernels.linear.block_weight import KINDS
from models.config import ConfigReader
from models.linear_layers import LinearSpec
from quantization.codes import CodeKind
from quantization.layouts.base import OutputAxis, StoredWeight, WeightLayout, WritableLayout
from quantization.layouts.checks import channel_order, divided, finite, of_type, positive, scalar_shape
from quantization.layouts.fp4 import SCALE_DTYPES, FP4Weight, warn_of_float_activations
from quantization.layouts.fp8 import Fp8Weight, read_block
from quantization.layouts.kv_cache import write_kv_cache_scheme
from quantization.layouts.packing import WORD, num_words, pack, unpack
from quantization.layouts.patterns import compile_pattern
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat, of_blocks

METHOD = "compressed-tensors"
PACKED, INTEGERS, FLOATS, MIXED = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"
DENSE = "dense"  # no weight is quantised; in a sparsity_config: zeros are stored
HEAD = "lm_head"  # vLLM does not count the head as "Linear", so a target must name it
FP4_FORMATS = {CodeKind.MXFP4: "mxfp4-pack-quantized", CodeKind.NVFP4: "nvfp4-pack-quantized"}
FP4_STRATEGIES = {CodeKind.MXFP4: "group", CodeKind.NVFP4: "tensor_group"}
FORMATS = (PACKED, INTEGERS, FLOATS, "naive-quantized", *FP4_FORMATS.values())


@dataclass(frozen=True)
class _Group:
    """An entry of `config_groups`: the layers that it targets, and their scheme."""

    targets: tuple[str, ...]
    scheme: LinearScheme
    is_packed: bool
    block: tuple[int, int] | None = None
    """Output and input channels of a block of float8 weights with one scale."""


@dataclass(frozen=True)
class CompressedTensors:
    """The `quantization_config` of a compressed-tensors checkpoint."""

    groups: tuple[_Group, ...]
    ignore: tuple[str, ...]

    def scheme(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        group = self._group(layer.name)
        return group.scheme if group else None

    def layout(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> WeightLayout:
        group = self._group(layer.name)
        assert group is not None
        if group.block is not None:
            return Fp8Weight(layer.shape, group.block, False, tensor_shapes)
        return weight_layout(layer.shape, group.scheme, group.is_packed, tensor_shapes)

    def _group(self, name: str) -> _Group | None:
        """Return the layer's group, or None. The layer's name is the best target, then an expression, then its class."""
        if any(_matches(target, name) for target in self.ignore):
            return None
        by_target = {target: group for group in self.groups for target in group.targets}
        matching = (group for target, group in by_target.items() if _matches(target, name))
        return by_target.get(name) or next(matching, by_target.get("Linear"))


def _matches(target: str, name: str) -> bool:
    """Whether a target matches this layer. After `re:` a target is a regular expression for the start of the name."""
    if not target.startswith("re:"):
        return name == target or name.endswith("." + target)
    return compile_pattern(target[3:]).match(name) is not None


def read_compressed_tensors(config: ConfigReader) -> CompressedTensors:
    """Read the `quantization_config`. Raises UserError for other formats and strategies, and for transforms."""
    general = config.expect("format", (*FORMATS, MIXED, DENSE), PACKED)
    for key in ("transform_config", "moe_sparsity_config"):
        config.expect(key, (None, {}), None)
    for key in ("quantization_status", "global_compression_ratio", "version", "quant_method"):
        config.raw(key)
    groups = config.section("config_groups")
    # `kv_cache` and `sparsity` read the contents of these two sections.
    other_sections = [config.raw(key) for key in ("kv_cache_scheme", "sparsity_config")]
    if groups is None and not any(other_sections):
        raise UserError("quantization_config: config_groups is empty")
    names = groups.values if groups else {}
    return CompressedTensors(
        tuple(_read_group(groups.section(name), name, general) for name in names if groups),
        _texts(config.raw("ignore") or [], "ignore"),
    )


def _read_group(group: ConfigReader | None, name: str, general: str) -> _Group:
    weights = group.section("weights") if group else None
    if group is None or weights is None:
        raise UserError(f"quantization_config: {name} has no weights")
    group.expect("output_activations", (None, {}), None)
    if weights.raw("type") == "float" and weights.raw("num_bits") == 4:
        return _read_fp4_group(group, weights, name, general)
    kind = CodeKind(weights.expect("type", ("int", "float"), "int").replace("float", "fp8"))
    strategies = ("channel", "tensor", "group" if kind is CodeKind.INT else "block")
    strategy = weights.expect("strategy", strategies, "channel")
    weights.expect("dynamic", (False,), False)
    block = read_block(weights, "block_structure") if strategy == "block" else None
    weights.expect("block_structure", (None,) if block is None else ([*block],), None)
    bits = weights.expect("num_bits", (8, 4) if kind is CodeKind.INT else (8,), 8)
    if not (symmetric := weights.get("symmetric", bool, True)) and bits == 8:
        raise UserError(f"quantization_config: {name}: symmetric=false is not supported with num_bits=8: only with 4")
    size_of_block = block[1] if block else None
    group_size = weights.count("group_size") if strategy == "group" else size_of_block
    _refuse_unknown(weights, f"{name}.weights")
    file_format = group.expect("format", (None, *FORMATS), None) or general
    scheme = LinearScheme(
        WeightFormat(bits, kind, symmetric, group_size, per_tensor=strategy == "tensor"),
        _read_activations(group.section("input_activations"), kind, name, block),
    )
    return _Group(_texts(group.raw("targets") or [], f"{name}.targets"), scheme, file_format == PACKED, block)


def _read_fp4_group(group: ConfigReader, weights: ConfigReader, name: str, general: str) -> _Group:
    """Read a group of FP4 weights. Logs a warning for quantised activations, which stay floats."""
    strategy = weights.expect("strategy", tuple(FP4_STRATEGIES.values()), "group")
    kind = next(kind for kind, named in FP4_STRATEGIES.items() if named == strategy)
    weights.expect("group_size", (KINDS[kind.name].group_size,), None)
    weights.expect("scale_dtype", (None, str(SCALE_DTYPES[kind.name])), None)
    weights.expect("symmetric", (True,), True)
    weights.expect("dynamic", (False,), False)
    _refuse_unknown(weights, f"{name}.weights")
    if (file_format := group.raw("format") or general) not in (FP4_FORMATS[kind], MIXED):
        raise UserError(
            f"quantization_config: {name} has FP4 weights in format={file_format!r}, not {FP4_FORMATS[kind]!r}"
        )
    if group.raw("input_activations"):
        warn_of_float_activations()
    return _Group(_texts(group.raw("targets") or [], f"{name}.targets"), LinearScheme(of_blocks(kind.name)), True)


def _read_activations(
    config: ConfigReader | None, kind: CodeKind, name: str, block: tuple[int, int] | None
) -> Activations:
    if config is None:
        return Activations.none
    config.expect("num_bits", (8,), 8)
    config.expect("type", ("int",) if kind is CodeKind.INT else ("float",), "int")
    config.expect("symmetric", (True,), True)
    dynamic = config.get("dynamic", bool, False)
    if block is not None:
        config.expect("dynamic", (True,), None)
        config.expect("group_size", (block[1],), None)
    strategy = "group" if block else "token" if dynamic else "tensor"
    config.expect("strategy", (strategy,), strategy)
    _refuse_unknown(config, f"{name}.input_activations")
    return Activations.dynamic if dynamic else Activations.static


def _refuse_unknown(config: ConfigReader, name: str) -> None:
    """Raises UserError for unread keys.

    Keys about calibration are ignored, and so are keys that are null or 0.
    """
    for key in ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype", "group_size", "block_structure"):
        config.raw(key)
    if unread := config.unread():
        raise UserError(f"quantization_config: {name} has settings that are not known: {', '.join(unread)}")


def _texts(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UserError(f"quantization_config: {key} is not a list of texts")
    return tuple(value)


def write_config(
    schemes: dict[str, LinearScheme], float_layers: list[str], permuted: bool, kv_cache: KVCacheFormat | None = None
) -> dict[str, Any]:
    """Return the `quantization_config` for `schemes`, which maps layer names to schemes.

    `float_layers` are the linear layers that stay floats. kv_cache: the format of a KV cache with static scales. permuted:
    whether the groups are not consecutive channels. The config records it, because a reader that ignores it computes
    wrong results. Raises UserError for block types of llama.cpp.
    """
    by_scheme: dict[LinearScheme, list[str]] = {}
    for name, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(name)
    most_common = max(by_scheme, key=lambda scheme: len(by_scheme[scheme]), default=None)
    formats = {_format(scheme) for scheme in by_scheme} or {DENSE}
    groups = {
        f"group_{i}": {
            "targets": ["Linear", *(name for name in names if name == HEAD)] if scheme == most_common else names,
            "weights": _write_weights(scheme.weights, permuted),
            "input_activations": _write_activations(scheme),
            "output_activations": None,
            "format": _format(scheme),
        }
        for i, (scheme, names) in enumerate(by_scheme.items())
    }
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": float_layers,
        "kv_cache_scheme": kv_cache and write_kv_cache_scheme(kv_cache),
    }


def write_sparsity_config(pattern: SparsityPattern, unpruned: list[str], share: float) -> dict[str, Any]:
    """Return the `sparsity_config` of weights that are stored with their zeros (compressed-tensors after 0.14).

    `unpruned` are the linear layers that are not pruned. share: the zeros of the pruned layers / all weights of the model.
    """
    return {
        "format": DENSE,
        "sparsity_structure": pattern.name,
        "global_sparsity": 100 * share,
        "targets": ["Linear"],
        "ignore": unpruned,
        "registry_requires_subclass": False,
    }


def writable_layout(
    shape: tuple[int, int], scheme: LinearScheme, tensor_shapes: Mapping[str, tuple[int, ...]]
) -> WritableLayout:
    """Return the layout of a weight [O, I] in files whose config is `write_config`'s."""
    return weight_layout(shape, scheme, _format(scheme) == PACKED, tensor_shapes)


def weight_layout(
    shape: tuple[int, int], scheme: LinearScheme, is_packed: bool, tensor_shapes: Mapping[str, tuple[int, ...]]
) -> WritableLayout:
    if scheme.weights.kind in FP4_FORMATS:
        return FP4Weight(scheme.weights.kind.name, shape, tensor_shapes)
    return CompressedWeight(shape, scheme, is_packed, tensor_shapes)


def _format(scheme: LinearScheme) -> str:
    if scheme.weights.kind in FP4_FORMATS:
        return FP4_FORMATS[scheme.weights.kind]
    if scheme.weights.kind.is_blocks:
        raise UserError(
            f"{scheme} is a type of llama.cpp, which no quantize.format holds: give int8, int4, mxfp4 or nvfp4 in quant.overrides"
        )
    if scheme.weights.kind is CodeKind.FP8:
        return FLOATS
    return PACKED if scheme.activations is Activations.none else INTEGERS


def _write_weights(format: WeightFormat, permuted: bool) -> dict[str, Any]:
    if format.kind in FP4_FORMATS:
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": FP4_STRATEGIES[format.kind],
            "group_size": format.group_size,
            "dynamic": False,
            "scale_dtype": str(SCALE_DTYPES[format.kind.name]),
        }
    strategy = "tensor" if format.per_tensor else "channel" if format.group_size is None else "group"
    return {
        "num_bits": format.bits,
        "type": "float" if format.kind is CodeKind.FP8 else "int",
        "symmetric": format.symmetric,
        "strategy": strategy,
        "group_size": format.group_size,
        "actorder": "group" if permuted and format.group_size else None,
        "dynamic": False,
    }


def _write_activations(scheme: LinearScheme) -> dict[str, Any] | None:
    if scheme.activations is Activations.none:
        return None
    dynamic = scheme.activations is Activations.dynamic
    return {
        "num_bits": 8,
        "type": "float" if scheme.weights.kind is CodeKind.FP8 else "int",
        "symmetric": True,
        "strategy": "token" if dynamic else "tensor",
        "dynamic": dynamic,
    }


@dataclass(frozen=True)
class CompressedWeight:
    """The tensors of one weight. `tensor_shapes` tells which optional tensors exist, and their shapes."""

    shape: tuple[int, int]
    scheme: LinearScheme
    is_packed: bool
    tensor_shapes: Mapping[str, tuple[int, ...]]
    stored_shape: tuple[int, int] | None = None
    """The shape in `weight_shape`, if this is a shard of the stored weight."""

    def __post_init__(self) -> None:
        divided(self.shape, self.scheme.weights.group_size)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        (outputs, inputs), format = self.shape, self.scheme.weights
        groups = divided(self.shape, format.group_size)
        scale: tuple[int, ...] = (outputs, groups)
        if format.per_tensor:
            scale = scalar_shape(self.tensor_shapes, "weight_scale")
        names: dict[str, tuple[int, ...]] = {"weight_scale": scale}
        if self.is_packed:
            names |= {"weight_packed": (outputs, num_words(inputs, format.bits)), "weight_shape": (2,)}
        else:
            names["weight"] = self.shape
        if not format.symmetric:
            names["weight_zero_point"] = (num_words(outputs, format.bits), groups) if self.is_packed else scale
        if "weight_g_idx" in self.tensor_shapes:
            names["weight_g_idx"] = (inputs,)
        if self.scheme.activations is Activations.static:
            names["input_scale"] = scalar_shape(self.tensor_shapes, "input_scale")
        return names

    def output_axes(self) -> dict[str, OutputAxis]:
        axes = {"weight_packed" if self.is_packed else "weight": OutputAxis(0)}
        if not self.scheme.weights.per_tensor:
            axes["weight_scale"] = OutputAxis(0)
        if not self.scheme.weights.symmetric and (self.is_packed or not self.scheme.weights.per_tensor):
            axes["weight_zero_point"] = OutputAxis(0, WORD // self.scheme.weights.bits if self.is_packed else 1)
        return axes

    def of_outputs(self, num_outputs: int) -> "CompressedWeight":
        return replace(self, shape=(num_outputs, self.shape[1]), stored_shape=self.stored_shape or self.shape)

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight. Raises UserError for a wrong dtype or packed shape, and for impossible scales."""
        (outputs, inputs), format = self.shape, self.scheme.weights
        scales = finite(tensors["weight_scale"], "weight_scale")
        if self.is_packed:
            file_shape, expected = tensors["weight_shape"].tolist(), list(self.stored_shape or self.shape)
            if file_shape != expected:
                raise UserError(f"weight_shape is {file_shape}, expected {expected}: the file is damaged")
            codes = unpack(of_type(tensors, "weight_packed", torch.int32), format.bits, inputs)
        else:
            dtype = torch.float8_e4m3fn if format.kind is CodeKind.FP8 else torch.int8
            codes = of_type(tensors, "weight", dtype)
        zero_points = self._zero_points(tensors)
        if format.per_tensor:
            scales = scales.reshape(1, 1)
            if format.kind is CodeKind.INT:  # integer kernels need a scale per output
                scales = scales.repeat(outputs, 1)
        permutation = None
        if "weight_g_idx" in tensors:
            permutation = channel_order(tensors["weight_g_idx"], format.group_size, "weight_g_idx")
        if permutation is not None:
            codes = codes[:, permutation]
        if format.bits == 4 and not format.symmetric:
            codes = codes + 8  # from -8..7 to 0..15, like the zero points
        static = self.scheme.activations is Activations.static
        input_scale = positive(tensors["input_scale"], "input_scale").reshape(()) if static else None
        return StoredWeight(QuantizedWeight(codes, scales, zero_points, permutation), input_scale)

    def _zero_points(self, tensors: dict[str, Tensor]) -> Tensor | None:
        if self.scheme.weights.symmetric:
            return None
        if not self.is_packed:
            zero_points = of_type(tensors, "weight_zero_point", torch.int8)
            return zero_points + 8 if self.scheme.weights.bits == 4 else zero_points
        packed = of_type(tensors, "weight_zero_point", torch.int32)
        return unpack(packed.T, self.scheme.weights.bits, self.shape[0]).T + 8

    def write(self, stored: StoredWeight) -> dict[str, Tensor]:
        weight, format = stored.weight, self.scheme.weights
        codes, tensors = weight.codes, {"weight_scale": weight.scales}
        if weight.permutation is not None:
            assert format.group_size is not None
            original = weight.permutation.argsort()
            codes = codes[:, original]
            tensors["weight_g_idx"] = (original // format.group_size).int()
        if not self.is_packed:
            tensors["weight"] = codes
        else:
            centred = codes if format.symmetric else codes - 8
            tensors |= {"weight_packed": pack(centred, format.bits), "weight_shape": torch.tensor(self.shape)}
        if weight.zero_points is not None:
            tensors["weight_zero_point"] = pack((weight.zero_points - 8).T, format.bits).T
        if format.per_tensor:
            tensors["weight_scale"] = weight.scales.reshape(-1)[:1]
        if stored.input_scale is not None:
            tensors["input_scale"] = stored.input_scale.reshape(1)
        return {name: tensor.contiguous() for name, tensor in tensors.items()}
