"""Read GGUF, llama.cpp's layout, whole or split, in Hugging Face's terms.

The result is config.json keys, and weights with Hugging Face's names, shapes and row order, dequantised during reading.
"""

import math
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader
from models.formats.base import Checkpoint
from models.formats.gguf.config import read_gguf_config
from models.formats.gguf.halves import Halves, find_halves
from models.formats.gguf.header import GGUFHeader, TensorInfo, all_tensors, read_gguf_headers
from models.formats.gguf.layouts import layout_to_read
from models.formats.gguf.names import TensorLayout
from models.formats.gguf.orders import column_orders, row_orders
from models.formats.gguf.scales import SCALED, of_expert, with_scales
from models.formats.gguf.shares import Share, find_shares
from models.formats.gguf.stacked import Stacked, find_stacked
from models.formats.gguf.tensors import STORED, read_bytes, read_scale, read_tensor
from models.formats.gguf.tokenizer import load_gguf_tokenizer

ROUNDING = 2**-22
"""The largest error of A_log from rounding its exponential to float32, by up to two steps."""
GLOBAL_SCALE = "global_scale"
"""Name, in a module, of the factor of its weight in blocks."""
PERMUTATION = "permutation"
"""Name, in a module, of the input channel of each column of its blocks."""
LAYER = re.compile(r"blk\.(\d+)\.")


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF model.

    Raises UserError for damaged or missing files, and for llama.cpp features that no family here has.
    """
    headers = read_gguf_headers(path)
    config = read_gguf_config(headers)
    return Checkpoint(
        headers[0].path,
        config,
        {},
        lambda expected: [GGUFWeights(headers, config)],
        partial(load_gguf_tokenizer, headers[0]),
    )


class GGUFWeights:
    """The tensors of a model's files with Hugging Face's names, as CodedWeights. Memory holds one tensor at a time.

    The files are read, not mapped: the process would crash if a mapped file became shorter.
    """

    is_mapped = False

    def __init__(self, headers: list[GGUFHeader], config: ConfigReader) -> None:
        """`config`: from read_gguf_config. Raises UserError if two tensors have the same Hugging Face name."""
        self.path = headers[0].path
        self._layout = layout_to_read(config)
        architecture = headers[0].section("general").require("architecture", str)
        self._row_orders = row_orders(config, architecture)
        self._column_orders = column_orders(config, architecture)
        self._sources: dict[str, TensorInfo] = {}
        tensors = with_scales(all_tensors(headers))
        self._halves: dict[str, Halves | Share] = {**find_halves(tensors), **find_shares(self._layout, tensors, config)}
        self._stacked = find_stacked(self._layout, tensors)
        self._with_global_scales: list[str] = []
        self._permuted: list[str] = []
        num_layers = config.get("num_hidden_layers", int, len(tensors))
        num_read = num_layers + config.get("num_nextn_predict_layers", int, 0)
        part_names = {name for matrix in (self._halves | self._stacked).values() for name in matrix.names}
        for name, tensor in tensors.items():
            if name in self._layout.settings or name in part_names:
                continue
            if (layer := LAYER.match(name)) and int(layer[1]) >= num_read:
                continue  # it predicts further tokens, and the family does not use it
            for hf_name, source in _hugging_face_tensors(self._layout, name, tensor).items():
                if hf_name in self._sources or hf_name in self._halves or hf_name in self._stacked:
                    raise UserError(f"{tensor.path} holds {hf_name} twice: the second is in {name!r}")
                self._sources[hf_name] = source
        self._numbers = _layer_numbers(self._layout, headers[0], num_layers)
        self.shapes = self._shapes()
        self.dtypes = {name: STORED.get(source.type, torch.float32) for name, source in self._sources.items()}
        self.dtypes |= dict.fromkeys(self._numbers, torch.float32)
        self.dtypes |= {name: matrix.dtype for name, matrix in (self._halves | self._stacked).items()}

    def coded_modules(self) -> dict[str, str]:
        types = {
            name: source.type
            for name, source in self._sources.items()
            if source.type not in STORED and len(source.shape) == 2
        }
        types |= {name: matrix.block_type for name, matrix in self._stacked.items() if matrix.block_type is not None}
        return {name.removesuffix(".weight"): type.name for name, type in types.items()}

    def permuted_modules(self) -> set[str]:
        return {
            name.removesuffix(".weight")
            for name, source in self._sources.items()
            if (order := self._column_orders.get(name.split(".")[-2])) is not None
            and source.type not in STORED
            and len(source.shape) == 2
            and source.shape[1] // order.multiple % source.block_size != 0
        }

    def keep_codes(self, modules: Iterable[str]) -> None:
        types, permuted = self.coded_modules(), self.permuted_modules()
        self._permuted = [module for module in modules if module in permuted]
        self._with_global_scales = [module for module in modules if types[module] == SCALED]
        for module in modules:
            if source := self._sources.pop(f"{module}.weight", None):
                self._sources[f"{module}.blocks"] = source
            if matrix := self._stacked.pop(f"{module}.weight", None):
                self._stacked[f"{module}.blocks"] = matrix
        # Largest first: a load then needs the memory of a small tensor, not of the head, in addition to all weights.
        self._sources = dict(sorted(self._sources.items(), key=lambda item: -item[1].num_bytes))
        self.shapes = self._shapes()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if name.endswith(f".{GLOBAL_SCALE}"):
                yield name, self._read_global_scale(name)
                continue
            if name.endswith(f".{PERMUTATION}"):
                yield name, self._read_permutation(name)
                continue
            tensor = self._read(name)
            module = name.split(".")[-2]
            if self._layout.norm_offset and module.endswith("norm") and not name.endswith(self._layout.plain_norms):
                tensor = tensor - self._layout.norm_offset
            if name.endswith(".A_log"):  # the file has -exp(A_log)
                tensor = _decay_log(f"{self.path}: {name}", tensor)
            if order := self._row_orders.get(module):
                if not order.fits(tensor.shape[0]):
                    wanted = f"{f'{order.first} and ' if order.first else ''}a multiple of {order.multiple}"
                    raise UserError(f"{self.path}: {name} has {tensor.shape[0]} rows, expected {wanted}")
                tensor = order.restore(tensor)
            if (order := self._column_orders.get(module)) and name.rpartition(".")[0] not in self._permuted:
                tensor = order.restore(tensor.T).T.contiguous()
            yield name, tensor

    def _read_global_scale(self, name: str) -> Tensor:
        source = self._sources.get(f"{name.rpartition('.')[0]}.blocks")
        return torch.ones(1) if source is None else read_scale(source)

    def _read_permutation(self, name: str) -> Tensor:
        module = name.rpartition(".")[0]
        channels = torch.arange(self._sources[f"{module}.blocks"].shape[1])
        return self._column_orders[module.split(".")[-1]].restore(channels).argsort()

    def _read(self, name: str) -> Tensor:
        if name in self._numbers:
            return self._numbers[name]
        if halves := self._halves.get(name):
            return halves.read()
        if matrix := self._stacked.get(name):
            return torch.from_numpy(matrix.read_blocks()) if name.endswith(".blocks") else matrix.read()
        source = self._sources[name]
        if name.endswith(".blocks"):
            return torch.from_numpy(read_bytes(source)).view(self.shapes[name])
        tensor = read_tensor(source)
        if self._is_depthwise(name):
            return tensor.reshape(self._shape(name, source))
        if name.endswith(self._layout.flat):
            return tensor.flatten()
        return tensor.T if self._is_transposed(name) else tensor

    def _is_transposed(self, name: str) -> bool:
        *_, module, leaf = name.split(".")
        return leaf == "weight" and module in self._layout.transposed

    def _is_depthwise(self, name: str) -> bool:
        *_, module, leaf = name.split(".")
        return leaf == "weight" and module in self._layout.depthwise

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: self._shape(name, source) for name, source in self._sources.items()}
        shapes |= {name: tuple(number.shape) for name, number in self._numbers.items()}
        shapes |= {name: halves.shape for name, halves in self._halves.items()}
        shapes |= {name: _stacked_shape(name, matrix) for name, matrix in self._stacked.items()}
        shapes |= {f"{module}.{PERMUTATION}": self._sources[f"{module}.blocks"].shape[1:] for module in self._permuted}
        return shapes | {f"{module}.{GLOBAL_SCALE}": (1,) for module in self._with_global_scales}

    def _shape(self, name: str, source: TensorInfo) -> tuple[int, ...]:
        if name.endswith(".blocks"):
            return source.shape[0], source.num_bytes // source.shape[0]
        if self._is_depthwise(name):
            return math.prod(source.shape[:-1]), 1, source.shape[-1]
        if name.endswith(self._layout.flat):
            return (math.prod(source.shape),)
        return source.shape[::-1] if self._is_transposed(name) else source.shape


def _layer_numbers(layout: TensorLayout, header: GGUFHeader, num_layers: int) -> dict[str, Tensor]:
    """Return the parameters of `TensorLayout.arrays`, by Hugging Face's names."""
    return {
        f"{layout.layers}.{i}.{name}": torch.full(shape, number, dtype=torch.float32)
        for key, (name, shape) in layout.arrays.items()
        for i, number in enumerate(header.numbers(key, "f", num_layers))
    }


def _stacked_shape(name: str, matrix: Stacked) -> tuple[int, int]:
    if not name.endswith(".blocks"):
        return matrix.shape
    return matrix.shape[0], matrix.parts[0].num_bytes // matrix.parts[0].shape[0]


def _decay_log(name: str, stored: Tensor) -> Tensor:
    """Return A_log, where the file has -exp(A_log). Raises UserError for a number above 0.

    Its exponential is rounded, so that neighbours of A_log have the same one. Most models store A_log in bfloat16, and
    the number of this type is chosen: it is the only one near.
    """
    if (largest := stored.amax().item()) > 0:
        raise UserError(f"{name} is -exp(A_log) in the file, but has {largest:g} above 0: convert the model again")
    exact = (-stored).double().log()
    stored_in_half = exact.bfloat16()
    return torch.where((stored_in_half - exact).abs() <= ROUNDING, stored_in_half, exact).float()


def _hugging_face_tensors(layout: TensorLayout, name: str, tensor: TensorInfo) -> dict[str, TensorInfo]:
    """Return the Hugging Face tensors that this tensor holds: itself, or the tensors of several modules."""
    parts = None
    if len(tensor.shape) == (2 if name.endswith("_exps.bias") else 3):
        parts = layout.module_names(name, tensor.shape[0])
    elif len(tensor.shape) == 2:
        parts = layout.head_names(name, tensor.shape[0])
    if parts is None or len(parts) % tensor.shape[0] or tensor.shape[1] * tensor.shape[0] % len(parts):
        return {layout.hugging_face_name(name): tensor}
    return {hf_name: of_expert(tensor, i, len(parts)) for i, hf_name in enumerate(parts)}
