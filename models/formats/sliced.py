"""Weight files as one rank of a sharded model reads them: only its tensors, in the shapes of its shards."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from models.causal_lm import CausalLM
from models.formats.base import RangedFile, WeightFile
from models.formats.sharded import ShardedFile
from models.sharding import ParallelLayout, Shard
from models.weights import expected_shapes


class SlicedFile:
    """One rank's view of a file: reads only its ranges if the format allows it, else one whole tensor at a time."""

    def __init__(self, file: WeightFile, names: Iterable[str], shards: Mapping[str, Shard]) -> None:
        """`names`: the tensors that the rank needs. `shards`: the shards of the sharded tensors."""
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
            for _, tensor in self._file.read([name]):
                # A copy of the part, so that the whole tensor can be freed.
                yield name, tensor if shard is None else slice_shard(tensor, shard).clone()
                del tensor  # frees it before the next one is read


def slice_shard(tensor: Tensor, shard: Shard) -> Tensor:
    """Return a shard; it is a view if the shard is one range."""
    parts = [tensor.narrow(shard.axis, indices.start, len(indices)) for indices in shard.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, shard.axis)


def sliced_files(
    files: Iterable[WeightFile],
    matched: Mapping[str, str],
    model: CausalLM,
    shards: Mapping[str, Shard],
    parallel_layout: ParallelLayout,
) -> list[WeightFile]:
    """Return the files from which a rank's `model` loads; `files` are the files of the whole model.

    If the files have the rank's parallel layout, the rank reads only its own file. `matched`: the model's names by the
    checkpoint's names, from `match_tensors` of the whole model. `shards`: from `shard_model`.
    """
    rank_tensors = expected_shapes(model).keys()
    needed = {stored_name: name for stored_name, name in matched.items() if name in rank_tensors}
    rank_shards = {stored_name: shards[name] for stored_name, name in needed.items() if name in shards}
    files = [file.of_rank(parallel_layout) if isinstance(file, ShardedFile) else file for file in files]
    return [SlicedFile(file, [name for name in file.shapes if name in needed], rank_shards) for file in files]
