"""Read the 4-bit weights of bitsandbytes (NF4 and FP4), as floats. Source: bitsandbytes 0.50, functional.py.

O output channels, I input channels, B weights per block. These tensors store NAME [O, I], such as q_proj.weight:
    NAME                   uint8 [ceil(O * I / 2), 1], row by row, the first of two weights in the upper half of a byte
    NAME.quant_map         float32 [16], the value of each code
    NAME.absmax            float32 [ceil(O * I / B)], the factor of each block
    NAME.quant_state.bitsandbytes__nf4 (or fp4)   uint8, a JSON text: shape, dtype, blocksize
With double quantisation, absmax holds codes, uint8, and NAME.nested_quant_map [256], NAME.nested_absmax, and the
nested_blocksize and nested_offset of the JSON text give the factors.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.decoding import warn_once
from conf.errors import UserError
from models.formats.base import WeightFile

METHOD = "bitsandbytes"
STATE = ".quant_state.bitsandbytes__"
KINDS = "nf4", "fp4"
PARTS = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *(STATE + kind for kind in KINDS)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}
MAX_STATE = 4096  # bytes of the JSON text; real ones have about 200
BYTES_AT_ONCE = 2**20
SETTINGS = """
    quant_method load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
    bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
    llm_int8_skip_modules llm_int8_threshold
""".split()


@dataclass(frozen=True)
class _State:
    shape: tuple[int, int]
    dtype: torch.dtype
    block_size: int
    nested_block_size: int
    offset: float


class BitsAndBytesFile:
    """A file that returns float weights. The file that holds a weight's codes lists the weight."""

    def __init__(self, file: WeightFile, states: Mapping[str, _State], holders: Mapping[str, WeightFile]) -> None:
        """`states`: of all weights with codes. `holders`: the file of each tensor, by tensor name."""
        self._file, self._states, self._holders = file, states, holders
        self.path, self.is_mapped = file.path, file.is_mapped
        names = [name for name in file.shapes if not name.endswith(PARTS)]
        self.shapes = {name: states[name].shape if name in states else file.shapes[name] for name in names}
        self.dtypes = {name: states[name].dtype if name in states else file.dtypes[name] for name in names}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if name in self._states:
                yield name, self._weight(name, self._states[name])
            else:
                yield from self._file.read([name])

    def _weight(self, name: str, state: _State) -> Tensor:
        """Return the weight [O, I]. Raises UserError for tensors that are missing or do not fit the state."""
        (outputs, inputs), packed = state.shape, self._tensor(name, torch.uint8).flatten()
        factors, values = self._factors(name, state), self._tensor(name + ".quant_map", torch.float32)
        count, num_blocks = outputs * inputs, -(-outputs * inputs // state.block_size)
        if (len(packed), len(factors), len(values)) != (-(-count // 2), num_blocks, 16):
            raise UserError(
                f"{self.path}: the codes, absmax or quant_map of {name} do not fit its shape {[*state.shape]}"
            )
        pairs = torch.stack((values.repeat_interleave(16), values.repeat(16)), 1)  # [256, 2], by byte
        per_step = BYTES_AT_ONCE // state.block_size * state.block_size
        weight = torch.empty(len(packed) * 2, dtype=state.dtype)
        for start in range(0, len(packed), per_step):
            part = pairs[packed[start : start + per_step].int()].flatten()
            blocks = factors[2 * start // state.block_size :]
            weight[2 * start : 2 * start + len(part)] = part * blocks.repeat_interleave(state.block_size)[: len(part)]
        return weight[:count].view(state.shape)

    def _factors(self, name: str, state: _State) -> Tensor:
        if name + ".nested_absmax" not in self._holders:
            return self._tensor(name + ".absmax", torch.float32)
        codes = self._tensor(name + ".absmax", torch.uint8)
        values = self._tensor(name + ".nested_quant_map", torch.float32)
        nested = self._tensor(name + ".nested_absmax", torch.float32)
        if (len(values), len(nested)) != (256, -(-len(codes) // state.nested_block_size)):
            raise UserError(f"{self.path}: nested_quant_map or nested_absmax of {name} does not fit its absmax")
        return values[codes.int()] * nested.repeat_interleave(state.nested_block_size)[: len(codes)] + state.offset

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = _read(self._holders, name)
        if tensor.dtype != dtype or dtype.is_floating_point and not tensor.isfinite().all():
            raise UserError(f"{self._holders[name].path}: {name} is not finite or not {dtype}")
        return tensor


def _read(holders: Mapping[str, WeightFile], name: str) -> Tensor:
    if name not in holders:
        raise UserError(f"the checkpoint has no {name}, which bitsandbytes writes: download it again")
    ((_, tensor),) = holders[name].read([name])
    return tensor


def _read_state(holders: Mapping[str, WeightFile], name: str) -> _State:
    path, tensor = holders[name].path, holders[name].shapes[name]
    try:
        if tensor[0] > MAX_STATE:
            raise ValueError(f"{tensor[0]} bytes")
        values = json.loads(bytes(_read(holders, name).tolist()))
        outputs, inputs = values["shape"]
        sizes = outputs, inputs, values["blocksize"], values.get("nested_blocksize", 1)
        if any(type(size) is not int or size < 1 for size in sizes) or values["blocksize"] % 2:
            raise ValueError(f"sizes {sizes}")
        offset = float(values.get("nested_offset", 0))
        return _State((outputs, inputs), DTYPES[values["dtype"]], values["blocksize"], sizes[-1], offset)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{path}: {name} is damaged or has another form ({type(error).__name__}: {reason})") from error


def float_files(files: list[WeightFile]) -> list[WeightFile]:
    """Return the files with float weights. Raises UserError for states that are damaged."""
    holders = {name: file for file in files for name in file.shapes}
    states = {name.partition(STATE)[0]: _read_state(holders, name) for name in holders if STATE in name}
    if not states:
        return files
    warn_once(f"the {len(states)} weights of bitsandbytes are unpacked to floats, which take more memory")
    return [BitsAndBytesFile(file, states, holders) for file in files]


def float_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json for the files that `float_files` returns, without a quantisation.

    Raises UserError for LLM.int8 and for settings that are not known.
    """
    settings = values.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != METHOD:
        return values
    if unknown := [key for key in settings if key not in SETTINGS]:
        raise UserError(f"quantization_config: {unknown[0]} is not known for quant_method={METHOD!r}")
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        raise UserError(
            "quantization_config: load_in_8bit=true is not supported: only load_in_4bit=true of bitsandbytes"
        )
    return {key: value for key, value in values.items() if key != "quantization_config"}
