"""Split the tensors of a checkpoint that join all experts of a layer into tensors of each expert.

N experts, E hidden channels, F channels of an expert.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from models.formats.base import ExpectedTensors, RangedFile, WeightFile
from models.formats.mxfp4 import BLOCK
from models.sharding import Shard

JOINED = (
    (".experts.gate_up_proj", ".experts.down_proj"),
    (".input_linear.weight", ".output_linear.weight"),  # Granite
)
"""Name suffixes of [N, 2F, E], with gate rows before up rows, and of [N, E, F].

Some files on the hub store the inputs first: [N, E, 2F] and [N, F, E].
"""

GPT_OSS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The parts of gpt-oss's experts, whose outputs alternate.

Its tensors are `gate_up_proj` [N, E, 2F] and `down_proj` [N, F, E], or both in MXFP4: `_blocks` uint8
[N, 2F, E / 32, 16], two numbers per byte, the first in the low bits, and `_scales` uint8 [N, 2F, E / 32]. `_bias` is
[N, 2F] and [N, E].
"""

Shape = tuple[int, ...]


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


def split_experts(files: list[WeightFile], expected: ExpectedTensors) -> list[WeightFile]:
    """Return the files with the tensors that a model `expected`. Tensors of other shapes do not change.

    Raises UserError if a file with joined experts cannot read parts of a tensor.
    """
    shapes = {name: shape for file in files for name, shape in file.shapes.items()}
    return [_split(file, shapes, expected) for file in files]


def _split(file: WeightFile, shapes: dict[str, Shape], expected: ExpectedTensors) -> WeightFile:
    parts = {name: part for joined in file.shapes for name, part in _parts_of(joined, shapes, expected)}
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


def _parts_of(name: str, shapes: dict[str, Shape], expected: ExpectedTensors) -> Iterator[tuple[str, _Part]]:
    """Yield the names and parts of a tensor; nothing if it does not hold experts."""
    prefix = name.rpartition(".experts.")[0]
    if f"{prefix}.experts.0.gate_proj.bias" in expected:
        yield from _gpt_oss_parts(name, prefix, shapes, expected)
    else:
        yield from _matrices_of(name, shapes, expected)


def _gpt_oss_parts(
    name: str, prefix: str, shapes: dict[str, Shape], expected: ExpectedTensors
) -> Iterator[tuple[str, _Part]]:
    channels, hidden = expected[f"{prefix}.experts.0.gate_proj.weight"].shape
    sizes = {"gate_up_proj": (2 * channels, hidden), "down_proj": (hidden, channels)}
    for joined, layers in GPT_OSS.items():
        outputs, inputs = sizes[joined]
        stem, blocks = f"{prefix}.experts.{joined}", (outputs, inputs // BLOCK)
        forms = {  # by name: the tensor's shape without experts, the part, its shape without outputs, whether it is transposed
            stem: ((inputs, outputs), "weight", (inputs,), True),
            f"{stem}_bias": ((outputs,), "bias", (), False),
            f"{stem}_blocks": ((*blocks, BLOCK // 2), "weight_packed", (inputs // 2,), False),
            f"{stem}_scales": (blocks, "weight_scale", blocks[1:], False),
        }
        if name not in forms or shapes[name][1:] != forms[name][0]:
            continue
        _, part, inner, is_transposed = forms[name]
        for expert in range(shapes[name][0]):
            for number, layer in enumerate(layers):
                rows = slice(number, None, len(layers))
                yield (
                    f"{prefix}.experts.{expert}.{layer}.{part}",
                    _Part(name, expert, rows, (outputs // len(layers), *inner), is_transposed),
                )


def _matrices_of(name: str, shapes: dict[str, Shape], expected: ExpectedTensors) -> Iterator[tuple[str, _Part]]:
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
            rows = slice(first, first + shape[0])
            yield f"{prefix}.experts.{expert}.{layer}.weight", _Part(name, expert, rows, shape, is_transposed)
