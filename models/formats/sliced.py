"""Weight files as a rank of a divided model sees them: with its tensors alone, in the shapes of its parts."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from models.causal_lm import CausalLM
from models.formats.base import RangedFile, WeightFile
from models.formats.sharded import ShardedFile
from models.sharding import ParallelLayout, Shard
from models.weights import expected_shapes


class SlicedFile:
    """A file's parts for one rank. Of a file that can it reads their ranges alone, of another the whole tensor, one at a time."""

    def __init__(self, file: WeightFile, names: Iterable[str], shards: Mapping[str, Shard]) -> None:
        """`names`: the tensors that the rank needs. `shards`: how they are cut, if they are."""
        self._file, self._shards = file, shards
        self.path, self.is_mapped = file.path, file.is_mapped
        self.shapes = {
            name: shards[name].shape(file.shapes[name]) if name in shards else file.shapes[name] for name in names
        }
        self.dtypes = {name: file.dtypes[name] for name in self.shapes if name in file.dtypes}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            shard = self._shards.get(name)
            if shard is not None and isinstance(self._file, RangedFile):
                yield name, self._file.read_ranges(name, shard)
                continue
            for _, whole in self._file.read([name]):
                yield name, whole if shard is None else part_of(whole, shard).clone()  # so that the whole need not stay
                del whole  # before the next is read


def part_of(whole: Tensor, shard: Shard) -> Tensor:
    """Return a part, which is a view where it is one range."""
    parts = [whole.narrow(shard.axis, each.start, len(each)) for each in shard.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, shard.axis)


def sliced_files(
    files: Iterable[WeightFile],
    matched: Mapping[str, str],
    model: CausalLM,
    shards: Mapping[str, Shard],
    parallel_layout: ParallelLayout,
) -> list[WeightFile]:
    """Return what a rank's `model` loads of the files of the whole one.

    Of files that are divided in the same way the rank reads its own alone. `matched`: the model's names by those of the checkpoint, which
    `match_tensors` returned for the whole. `shards`: what `divide` returned.
    """
    wanted = expected_shapes(model).keys()
    needed = {found: name for found, name in matched.items() if name in wanted}
    own = {found: shards[name] for found, name in needed.items() if name in shards}
    files = [file.of_rank(parallel_layout) if isinstance(file, ShardedFile) else file for file in files]
    return [SlicedFile(file, [name for name in file.shapes if name in needed], own) for file in files]
