"""Weight files as a rank of a divided model sees them: with its tensors alone, in the shapes of its parts."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from models.causal_lm import CausalLM
from models.cuts import Cut, Division
from models.formats.base import RangedFile, WeightFile
from models.formats.sharded import ShardedFile
from models.weights import expected_shapes


class SlicedFile:
    """A file's parts for one rank. Of a file that can it reads their ranges alone, of another the whole tensor, one at a time."""

    def __init__(self, file: WeightFile, names: Iterable[str], cuts: Mapping[str, Cut]) -> None:
        """`names`: the tensors that the rank needs. `cuts`: how they are cut, if they are."""
        self._file, self._cuts = file, cuts
        self.path, self.is_mapped = file.path, file.is_mapped
        self.shapes = {
            name: cuts[name].shape(file.shapes[name]) if name in cuts else file.shapes[name] for name in names
        }
        self.dtypes = {name: file.dtypes[name] for name in self.shapes if name in file.dtypes}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            cut = self._cuts.get(name)
            if cut is not None and isinstance(self._file, RangedFile):
                yield name, self._file.read_ranges(name, cut)
                continue
            for _, whole in self._file.read([name]):
                yield name, whole if cut is None else part_of(whole, cut).clone()  # so that the whole need not stay
                del whole  # before the next is read


def part_of(whole: Tensor, cut: Cut) -> Tensor:
    """Return a part, which is a view where it is one range."""
    parts = [whole.narrow(cut.axis, each.start, len(each)) for each in cut.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, cut.axis)


def sliced_files(
    files: Iterable[WeightFile],
    matched: Mapping[str, str],
    model: CausalLM,
    cuts: Mapping[str, Cut],
    division: Division,
) -> list[WeightFile]:
    """Return what a rank's `model` loads of the files of the whole one.

    Of files that are divided in the same way the rank reads its own alone. `matched`: the model's names by those of the checkpoint, which
    `match_tensors` returned for the whole. `cuts`: what `divide` returned.
    """
    wanted = expected_shapes(model).keys()
    needed = {found: name for found, name in matched.items() if name in wanted}
    own = {found: cuts[name] for found, name in needed.items() if name in cuts}
    files = [file.of_rank(division) if isinstance(file, ShardedFile) else file for file in files]
    return [SlicedFile(file, [name for name in file.shapes if name in needed], own) for file in files]
