"""Split the three-dimensional expert tensors of a checkpoint into one matrix for each layer of each expert.

N experts, E hidden channels, F channels of an expert.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from models.formats.base import ExpectedTensors, RangedFile, WeightFile
from models.sharding import Shard

JOINED = (
    (".experts.gate_up_proj", ".experts.down_proj"),
    (".input_linear.weight", ".output_linear.weight"),  # Granite
)
"""Name suffixes of [N, 2F, E], with gate rows before up rows, and of [N, E, F].

Some files on the hub store the inputs first: [N, E, 2F] and [N, F, E].
"""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Matrix:
    """The position of an expert's matrix in a joined tensor."""

    joined: str
    expert: int
    first: int
    """Index of its first output among the expert's outputs in the joined tensor."""
    shape: tuple[int, int]
    is_transposed: bool


class SplitFile:
    """A file with one matrix for each layer of each expert. It reads one expert of a joined tensor at a time."""

    def __init__(self, file: RangedFile, matrices: dict[str, _Matrix]) -> None:
        """`matrices`: by the names that this file gives them."""
        self._file, self._matrices = file, matrices
        self.path, self.is_mapped = file.path, file.is_mapped
        joined = {matrix.joined for matrix in matrices.values()}
        self.shapes = {name: shape for name, shape in file.shapes.items() if name not in joined}
        self.shapes |= {name: matrix.shape for name, matrix in matrices.items()}
        self.dtypes = {name: dtype for name, dtype in file.dtypes.items() if name not in joined}
        self.dtypes |= {name: file.dtypes[matrix.joined] for name, matrix in matrices.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if name in self._matrices:
                yield name, self._read(self._matrices[name])
            else:
                yield from self._file.read([name])

    def read_ranges(self, name: str, shard: Shard) -> Tensor:
        if name not in self._matrices:
            return self._file.read_ranges(name, shard)
        matrix = self._read(self._matrices[name])
        return torch.cat(
            [matrix.narrow(shard.axis, indices.start, len(indices)) for indices in shard.ranges], shard.axis
        )

    def _read(self, matrix: _Matrix) -> Tensor:
        expert = self._file.read_ranges(matrix.joined, Shard(0, (range(matrix.expert, matrix.expert + 1),)))[0]
        oriented = expert.T if matrix.is_transposed else expert
        rows = oriented.narrow(0, matrix.first, matrix.shape[0])
        # Without a copy, the view would keep the whole expert in memory.
        return rows.clone(memory_format=torch.contiguous_format)


def split_experts(files: list[WeightFile], expected: ExpectedTensors) -> list[WeightFile]:
    """Return the files with the tensors that a model `expected`. Tensors of other shapes do not change.

    Raises UserError if a file with joined experts cannot read parts of a tensor.
    """
    shapes = {name: shape for file in files for name, shape in file.shapes.items()}
    return [_split(file, shapes, expected) for file in files]


def _split(file: WeightFile, shapes: dict[str, Shape], expected: ExpectedTensors) -> WeightFile:
    matrices = {
        name: matrix for joined_name in file.shapes for name, matrix in _matrices_of(joined_name, shapes, expected)
    }
    if not matrices:
        return file
    if duplicate := next((name for name in matrices if name in shapes), None):
        raise UserError(
            f"{file.path} holds {duplicate} in {matrices[duplicate].joined}, but the checkpoint also has it as a tensor of its own"
        )
    if not isinstance(file, RangedFile):
        raise UserError(
            f"{file.path} joins experts in one tensor, which only safetensors files support: convert it to safetensors"
        )
    return SplitFile(file, matrices)


def _matrices_of(name: str, shapes: dict[str, Shape], expected: ExpectedTensors) -> Iterator[tuple[str, _Matrix]]:
    """Yield the names and matrices in a tensor; nothing if it does not hold experts."""
    suffixes = next((pair for pair in JOINED if name.endswith(pair)), ("", ""))
    prefix = name.removesuffix(suffixes[0]).removesuffix(suffixes[1])
    gate = expected.get(f"{prefix}.experts.0.gate_proj.weight")
    if gate is None or prefix == name:
        return
    channels, hidden = gate.shape
    output_first = dict(
        zip((f"{prefix}{suffix}" for suffix in suffixes), ((2 * channels, hidden), (hidden, channels)), strict=True)
    )
    # A square shape does not show the order of axes. At most one of the two shapes is square.
    orders = {
        shapes[joined_name][1:] == size[::-1]
        for joined_name, size in output_first.items()
        if joined_name in shapes and size[0] != size[1]
    }
    is_transposed = orders == {True}
    if len(orders) > 1 or shapes[name][1:] != (output_first[name][::-1] if is_transposed else output_first[name]):
        return
    layers = {"down_proj": (0, (hidden, channels))}
    if name.endswith(suffixes[0]):
        layers = {"gate_proj": (0, (channels, hidden)), "up_proj": (channels, (channels, hidden))}
    for expert in range(shapes[name][0]):
        for layer, (first, shape) in layers.items():
            yield f"{prefix}.experts.{expert}.{layer}.weight", _Matrix(name, expert, first, shape, is_transposed)
