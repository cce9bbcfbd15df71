"""Split the tensors of a checkpoint that join all experts of a layer into tensors of each expert.

A family declares their form (`JoinedExperts`). N experts; O outputs and I inputs of an expert in a tensor.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from conf.errors import UserError
from models.formats.base import ExpectedTensors, RangedFile, WeightFile
from models.formats.mxfp4 import BLOCK
from models.layout import JoinedExperts
from models.sharding import Shard

Shape = tuple[int, ...]
FIRST_GATE = ".experts.0.gate_proj.weight"


@dataclass(frozen=True)
class _Part:
    """The position of a tensor of an expert in a joined tensor."""

    joined: str
    expert: int
    outputs: slice
    """Its outputs among the expert's outputs in the joined tensor."""
    shape: Shape
    is_transposed: bool


class SplitFile:
    """A file with the tensors of each expert. It reads one expert of a joined tensor at a time."""

    def __init__(self, file: RangedFile, parts: dict[str, _Part]) -> None:
        """`parts`: by the names that this file gives them."""
        self._file, self._parts = file, parts
        self.path, self.is_mapped = file.path, file.is_mapped
        joined = {part.joined for part in parts.values()}
        self.shapes = {name: shape for name, shape in file.shapes.items() if name not in joined}
        self.shapes |= {name: part.shape for name, part in parts.items()}
        self.dtypes = {name: dtype for name, dtype in file.dtypes.items() if name not in joined}
        self.dtypes |= {name: file.dtypes[part.joined] for name, part in parts.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if name in self._parts:
                yield name, self._read(self._parts[name])
            else:
                yield from self._file.read([name])

    def read_ranges(self, name: str, shard: Shard) -> Tensor:
        if name not in self._parts:
            return self._file.read_ranges(name, shard)
        tensor = self._read(self._parts[name])
        return torch.cat(
            [tensor.narrow(shard.axis, indices.start, len(indices)) for indices in shard.ranges], shard.axis
        )

    def _read(self, part: _Part) -> Tensor:
        expert = self._file.read_ranges(part.joined, Shard(0, (range(part.expert, part.expert + 1),)))[0]
        rows = (expert.T if part.is_transposed else expert)[part.outputs]
        # Without a copy, the view would keep the whole expert in memory.
        return rows.clone(memory_format=torch.contiguous_format).view(part.shape)


def split_experts(files: list[WeightFile], expected: ExpectedTensors, form: JoinedExperts) -> list[WeightFile]:
    """Return the files with the tensors that a model `expected`. Tensors of other shapes do not change.

    Raises UserError if a file with joined experts cannot read parts of a tensor.
    """
    shapes = {name: shape for file in files for name, shape in file.shapes.items()}
    layers = {name.removesuffix(FIRST_GATE): gate.shape for name, gate in expected.items() if name.endswith(FIRST_GATE)}
    parts = {name: part for layer, gate in layers.items() for name, part in _parts_of(layer, gate, shapes, form)}
    return [
        _split(file, shapes, {name: part for name, part in parts.items() if part.joined in file.shapes})
        for file in files
    ]


def _split(file: WeightFile, shapes: Mapping[str, Shape], parts: dict[str, _Part]) -> WeightFile:
    if not parts:
        return file
    if duplicate := next((name for name in parts if name in shapes), None):
        raise UserError(
            f"{file.path} holds {duplicate} in {parts[duplicate].joined}, but the checkpoint also has it as a tensor of its own"
        )
    if not isinstance(file, RangedFile):
        raise UserError(
            f"{file.path} joins experts in one tensor, which only safetensors files support: convert it to safetensors"
        )
    return SplitFile(file, parts)


def _parts_of(layer: str, gate: Shape, shapes: Mapping[str, Shape], form: JoinedExperts) -> Iterator[tuple[str, _Part]]:
    """Yield the names and parts of a layer's experts. `gate`: the shape of one gate_proj."""
    channels, hidden = gate
    sizes = {f"{layer}.{form.gate_up}": (2 * channels, hidden), f"{layer}.{form.down}": (hidden, channels)}
    inputs_first = _has_inputs_first(sizes, shapes) if form.inputs_first is None else form.inputs_first
    if inputs_first is None:
        return
    for (name, (outputs, inputs)), modules in zip(
        sizes.items(), (("gate_proj", "up_proj"), ("down_proj",)), strict=True
    ):
        size = outputs // len(modules)
        for ending, (kind, of_output) in _tensors_of(inputs).items():
            is_transposed, shape = inputs_first and not ending, (outputs, *of_output)
            if shapes.get(name + ending, ())[1:] != (shape[::-1] if is_transposed else shape):
                continue
            flat = (size, math.prod(of_output)) if of_output else (size,)
            for expert, (number, module) in product(range(shapes[name + ending][0]), enumerate(modules)):
                halves = slice(number * size, (number + 1) * size)
                rows = slice(number, None, len(modules)) if form.alternates else halves
                part = _Part(name + ending, expert, rows, flat, is_transposed)
                yield f"{layer}.experts.{expert}.{module}.{kind}", part


def _tensors_of(inputs: int) -> dict[str, tuple[str, Shape]]:
    """Return the names of an expert's tensors and the shapes of an output, by the end of the joined tensor's name.

    MXFP4 has blocks uint8, two numbers per byte, the first in the low bits, and scales uint8.
    """
    groups = inputs // BLOCK
    return {
        "": ("weight", (inputs,)),
        "_bias": ("bias", ()),
        "_blocks": ("weight_packed", (groups, BLOCK // 2)),
        "_scales": ("weight_scale", (groups,)),
    }


def _has_inputs_first(sizes: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> bool | None:
    """Return the order of axes that `shapes` show, by the sizes [O, I]. None: they contradict each other.

    A square shape shows no order. At most one of the two shapes is square.
    """
    orders = {shapes[name][1:] == size[::-1] for name, size in sizes.items() if name in shapes and size[0] != size[1]}
    return None if len(orders) > 1 else True in orders
