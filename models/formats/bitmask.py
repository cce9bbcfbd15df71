"""Read the sparse weights of compressed-tensors up to 0.14: one bit per weight, and the nonzero weights in sequence.

O rows, I columns. These tensors store a weight NAME.weight [O, I] of any dtype:
    NAME.bitmask      uint8 [O, ceil(I / 8)], lowest bit first: 1 if the weight is stored
    NAME.compressed   the stored weights, row by row: [O, I / 2] for the 2:4 pattern, else one axis
    NAME.shape        int64, O and I: [2, 1] for the 2:4 pattern, else [2]
    NAME.row_offsets  int64 [O], not for the 2:4 pattern: index of a row's first stored weight; the bits give it too

Embeddings and norms may have this form too; a vector has no O.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from models.formats.base import WeightFile

BITMASK, VALUES, SHAPE, OFFSETS = ".bitmask", ".compressed", ".shape", ".row_offsets"
WEIGHT = ".weight"
FORMATS = ("sparse-bitmask", "sparse-24-bitmask")  # formats in a sparsity_config
TYPES = {BITMASK: torch.uint8, SHAPE: torch.int64}


class BitmaskFile:
    """A file that returns dense weights.

    The file that holds a weight's bitmask lists the weight. Other files may hold the weight's other tensors.
    """

    def __init__(self, file: WeightFile, modules: Sequence[str], holders: Mapping[str, WeightFile]) -> None:
        """`modules`: all modules with sparse weights. `holders`: the file of each tensor, by tensor name.

        Raises UserError for tensors that are missing, duplicate or inconsistent.
        """
        self._file, self._holders = file, holders
        self.path, self.is_mapped = file.path, file.is_mapped
        parts = {module + end for module in modules for end in (BITMASK, VALUES, SHAPE, OFFSETS)}
        self.shapes = {name: shape for name, shape in file.shapes.items() if name not in parts}
        self.dtypes = {name: dtype for name, dtype in file.dtypes.items() if name not in parts}
        for module in modules:
            if module + BITMASK in file.shapes:
                self.shapes[module + WEIGHT] = self._shape(module)
                self.dtypes[module + WEIGHT] = holders[module + VALUES].dtypes[module + VALUES]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if name in self._file.shapes:
                yield from self._file.read([name])
            else:
                yield name, self._weight(name.removesuffix(WEIGHT))

    def _shape(self, module: str) -> tuple[int, ...]:
        if module + WEIGHT in self._holders:
            raise UserError(f"{self.path} has {module}{BITMASK}, but the checkpoint also has {module}{WEIGHT}")
        for end in (VALUES, SHAPE):
            if module + end not in self._holders:
                raise UserError(f"{self.path} has {module}{BITMASK}, but the checkpoint has no {module}{end}")
        for end, dtype in TYPES.items():
            if (actual := self._holders[module + end].dtypes[module + end]) != dtype:
                raise UserError(f"{self.path}: {module}{end} is {actual}, expected {dtype}")
        shape = tuple(self._tensor(module + SHAPE).flatten().tolist())
        packed = self._file.shapes[module + BITMASK]
        if not shape or packed != (*shape[:-1], -(-shape[-1] // 8)):
            raise UserError(f"{self.path}: {module}{BITMASK} {list(packed)} does not fit {module}{SHAPE}={list(shape)}")
        return shape

    def _weight(self, module: str) -> Tensor:
        """Return the weight [O, I].

        Raises UserError if the number of stored weights differs from the number of 1 bits.
        """
        bitmask, values = self._tensor(module + BITMASK), self._tensor(module + VALUES).flatten()
        bits = (bitmask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1  # [O, ceil(I / 8), 8]
        is_stored = bits.flatten(-2)[..., : self.shapes[module + WEIGHT][-1]].bool()  # [O, I]
        if (count := int(is_stored.sum())) != len(values):
            raise UserError(
                f"{self.path}: {module}{BITMASK} has {count} bits set, but {module}{VALUES} has {len(values)}"
            )
        weight = torch.zeros(is_stored.shape, dtype=values.dtype)
        dtype = torch.int8 if values.itemsize == 1 else values.dtype  # torch cannot index float8
        weight.view(dtype)[is_stored] = values.view(dtype)
        return weight

    def _tensor(self, name: str) -> Tensor:
        ((_, tensor),) = self._holders[name].read([name])
        return tensor


def dense_files(files: list[WeightFile]) -> list[WeightFile]:
    """Return the files with dense weights. Raises UserError as `BitmaskFile` does."""
    modules = [name.removesuffix(BITMASK) for file in files for name in file.shapes if name.endswith(BITMASK)]
    holders = {name: file for file in files for name in file.shapes}
    return [BitmaskFile(file, modules, holders) for file in files] if modules else files


def dense_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json for the files that `dense_files` returns: the format in its sparsity_config is `dense`."""
    quantization = values.get("quantization_config")
    if not isinstance(quantization, dict):
        return values
    sparsity = quantization.get("sparsity_config")
    if not isinstance(sparsity, dict) or sparsity.get("format") not in FORMATS:
        return values
    return values | {"quantization_config": quantization | {"sparsity_config": sparsity | {"format": "dense"}}}
