"""Read PaddleNLP's quantised checkpoints (llm/run_quantization.py) as compressed-tensors checkpoints.

The weights are codes stored in a float dtype. act_scales.json, weight_scales.json and cachekv_scales.json in the same
folder have thresholds t, the largest magnitudes:
    weight       code · t / 127, one t for each output channel
    input        the code is round(127 · x / t)
    key, value   one t for each query head; the first t of a group is the key/value head's
fp8 has 448 instead of 127, and one t for a weight.

O output channels, G key/value heads.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader, read_json
from models.formats.base import WeightFile
from models.formats.paddle.names import Names

INPUTS, WEIGHTS, CACHE = "act_scales.json", "weight_scales.json", "cachekv_scales.json"
INPUT_END, WEIGHT_END = ".activation_quanter", ".weight_quanter"
CACHE_ENDS = {".cachek_matmul.activation_quanter": "k_scale", ".cachev_matmul.activation_quanter": "v_scale"}
SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""By layer, the layer that shares its input. Files have the threshold of the shared layer; some have both thresholds."""
KINDS = {
    "a8w8": ("int", torch.int8, 127.0),
    "a8w8c8": ("int", torch.int8, 127.0),
    "a8w8_fp8": ("float", torch.float8_e4m3fn, 448.0),
}
OTHER_KINDS = ("weight_quantize_algo", "quant_method")  # quantisations without scale files
SMOOTHED = "shift_smooth_all_linears"
NO_SHIFT = "inputs that were shifted before quantisation have no scale per tensor: quantise without shift"


@dataclass(frozen=True)
class Scales:
    """The scales of a quantised checkpoint, by our module names."""

    kind: str
    """PaddleNLP's `quant_type`."""
    weights: dict[str, Tensor]
    """[O, 1]; [1] for fp8."""
    inputs: dict[str, Tensor]
    """[1]."""
    cache: dict[str, Tensor]
    """[G, 1, 1], by tensor name."""
    is_smoothed: bool = False
    """Whether o_proj and down_proj also have smoothing factors for their inputs."""

    def config(self) -> dict[str, Any]:
        """Return the `quantization_config` of a compressed-tensors checkpoint."""
        type, _, _ = KINDS[self.kind]
        number = {"num_bits": 8, "type": type, "symmetric": True, "dynamic": False}
        weights = number | {"strategy": "channel" if type == "int" else "tensor"}
        cache = number | {"type": "int", "strategy": "attn_head"}
        group = {
            "targets": sorted(self.weights),
            "weights": weights,
            "input_activations": number | {"strategy": "tensor"},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if type == "int" else "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [],
            "kv_cache_scheme": cache if self.cache else None,
        }


def read_scales(folder: Path, config: ConfigReader, names: Names) -> Scales | None:
    """Return a folder's scales; None if its weights are floats.

    Raises UserError for scales that are unsupported or inconsistent.
    """
    settings = config.section("quantization_config")
    kind = settings.raw("quant_type") if settings else None
    if settings is not None:
        for key in OTHER_KINDS:
            settings.expect(key, (None,), None)
    if settings is None or kind in (None, ""):
        if (folder / WEIGHTS).is_file():
            raise UserError(f"{folder} has {WEIGHTS}, but its config has no quantization_config.quant_type: add it")
        return None
    settings.expect("quant_type", tuple(KINDS), None)
    if settings.raw("shift"):
        raise UserError(f"{folder}: quantization_config.shift={settings.raw('shift')!r} is not supported: {NO_SHIFT}")
    may_smooth = (False, None) if kind == "a8w8_fp8" else (False, True, None)
    is_smoothed = bool(settings.expect(SMOOTHED, may_smooth, False))
    if not (folder / WEIGHTS).is_file() or not (folder / INPUTS).is_file():
        raise UserError(
            f"{folder} is quantised ({kind}), but lacks {INPUTS} or {WEIGHTS}: join the files of ranks first"
        )
    largest = KINDS[kind][2]
    inputs = {
        name: _thresholds(thresholds, name, 1) / largest
        for name, thresholds in _entries(folder / INPUTS, INPUT_END, names)
    }
    weights = {
        name: _thresholds(thresholds, name) / largest
        for name, thresholds in _entries(folder / WEIGHTS, WEIGHT_END, names)
    }
    shared = {name: inputs.get(_input_module(name), inputs.get(name)) for name in weights}
    if without := next((name for name, scale in shared.items() if scale is None), None):
        raise UserError(f"{folder / INPUTS} has no threshold for the input of {without}, whose weight is quantised")
    if kind != "a8w8_fp8":
        weights = {name: scales.unsqueeze(1) for name, scales in weights.items()}
    cache = _read_cache(folder, config, names)
    if kind == "a8w8c8" and not cache:
        raise UserError(f"{folder} is quantised (a8w8c8), but has no {CACHE}")
    return Scales(
        kind, weights, {name: scale for name, scale in shared.items() if scale is not None}, cache, is_smoothed
    )


def _input_module(name: str) -> str:
    parent, _, module = name.rpartition(".")
    return f"{parent}.{SAME_INPUT.get(module, module)}"


def _read_cache(folder: Path, config: ConfigReader, names: Names) -> dict[str, Tensor]:
    heads = config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", heads)
    scales = {}
    for end, scale_name in CACHE_ENDS.items():
        for name, thresholds in _entries(folder / CACHE, end, names, tuple(CACHE_ENDS)):
            query_scales = _thresholds(thresholds, name, heads) / 127.0
            scales[f"{name}.{scale_name}"] = query_scales[:: heads // groups].reshape(-1, 1, 1)
    return scales


def _entries(
    file: Path, end: str, names: Names, ends: tuple[str, ...] = (INPUT_END, WEIGHT_END)
) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a file whose names end with `end`, by our module names.

    Raises UserError for a name with none of the suffixes in `ends`.
    """
    for name, value in read_json(file).items():
        if name.endswith(end):
            module = name.removesuffix(end).removesuffix(".layer")  # `.layer`: a wrapper for smoothed inputs
            yield names.hf_name(f"{module}.weight").removesuffix(".weight"), value
        elif not name.endswith(ends):
            raise UserError(f"{file}: {name} is not the name of a threshold")


def _thresholds(value: Any, name: str, count: int | None = None) -> Tensor:
    """Return thresholds as float32 [N]. Raises UserError unless they are `count` finite numbers above 0."""
    values = value if isinstance(value, list) else [value]
    is_sound = all(type(number) in (int, float) and math.isfinite(number) and number > 0 for number in values)
    if not values or not is_sound or count not in (None, len(values)):
        expected = f"{count} finite numbers" if count else "finite numbers"
        raise UserError(f"the thresholds of {name} are {str(value)[:60]}, expected {expected} above 0")
    return torch.tensor(values, dtype=torch.float32)


class CodedFile:
    """A file that returns quantised weights as codes, and their scales. Other tensors do not change."""

    is_mapped = False

    def __init__(self, file: WeightFile, scales: Scales) -> None:
        """Raises UserError for scales of a weight that is missing or has another number of outputs."""
        self.path, self._file, self._scales = file.path, file, scales
        self._scale_tensors = {f"{name}.weight_scale": scale for name, scale in scales.weights.items()}
        self._scale_tensors |= {f"{name}.input_scale": scale for name, scale in scales.inputs.items()} | scales.cache
        self.shapes, self.dtypes = dict(file.shapes), dict(file.dtypes)
        for name, scale in scales.weights.items():
            shape = file.shapes.get(f"{name}.weight")
            if not shape or len(scale) not in (shape[0], 1):
                raise UserError(
                    f"{file.path.parent}: {WEIGHTS} has {len(scale)} thresholds of {name}, whose weight is {shape}"
                )
            self.dtypes[f"{name}.weight"] = KINDS[scales.kind][1]
        self.shapes |= {name: tuple(scale.shape) for name, scale in self._scale_tensors.items()}
        self.dtypes |= dict.fromkeys(self._scale_tensors, torch.float32)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if name in self._scale_tensors:
                yield name, self._scale_tensors[name]
                continue
            for _, tensor in self._file.read([name]):
                yield (
                    name,
                    self._codes(name, tensor) if name.removesuffix(".weight") in self._scales.weights else tensor,
                )

    def _codes(self, name: str, tensor: Tensor) -> Tensor:
        _, dtype, largest = KINDS[self._scales.kind]
        values, least = tensor.float(), -largest - (dtype == torch.int8)  # a clipped weight may have -128
        if not ((values >= least) & (values <= largest)).all() or not values.equal(values.round()):
            raise UserError(
                f"{self.path}: {name} holds values that are not codes of {dtype}, but {WEIGHTS} has its thresholds"
            )
        return values.to(dtype)
