"""Weight files whose tensors have other names than a model's."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from models.formats.base import RangedFile, WeightFile
from models.sharding import Shard


class RenamedFile:
    """A file with some of its tensors, under other names."""

    def __init__(self, file: WeightFile, names: Mapping[str, str]) -> None:
        """names: by the new names those in the file."""
        self._file, self._names = file, names
        self.path, self.is_mapped = file.path, file.is_mapped
        self.shapes = {name: file.shapes[found] for name, found in names.items()}
        self.dtypes = {name: file.dtypes[found] for name, found in names.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            for _, tensor in self._file.read([self._names[name]]):
                yield name, tensor


class RangedRenamedFile(RenamedFile):
    """One of which parts of tensors are read without the rest."""

    def __init__(self, file: RangedFile, names: Mapping[str, str]) -> None:
        super().__init__(file, names)
        self._ranged = file

    def read_ranges(self, name: str, shard: Shard) -> Tensor:
        return self._ranged.read_ranges(self._names[name], shard)


def renamed(file: WeightFile, names: Mapping[str, str]) -> WeightFile:
    """Return the file with these tensors alone. names: by the new names those in the file."""
    return RangedRenamedFile(file, names) if isinstance(file, RangedFile) else RenamedFile(file, names)
