"""Weight files with renamed tensors."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from models.formats.base import RangedFile, WeightFile
from models.sharding import Shard


class RenamedFile:
    """A file with some of its tensors, under other names."""

    def __init__(self, file: WeightFile, names: Mapping[str, str]) -> None:
        """`names`: the names in the file, by new name."""
        self._file, self._names = file, names
        self.path, self.is_mapped = file.path, file.is_mapped
        self.shapes = {name: file.shapes[stored_name] for name, stored_name in names.items()}
        self.dtypes = {name: file.dtypes[stored_name] for name, stored_name in names.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            for _, tensor in self._file.read([self._names[name]]):
                yield name, tensor


class RangedRenamedFile(RenamedFile):
    """A renamed file that can read parts of tensors."""

    def __init__(self, file: RangedFile, names: Mapping[str, str]) -> None:
        super().__init__(file, names)
        self._ranged = file

    def read_ranges(self, name: str, shard: Shard) -> Tensor:
        return self._ranged.read_ranges(self._names[name], shard)


def renamed(file: WeightFile, names: Mapping[str, str]) -> WeightFile:
    """Return the file with only these tensors. `names`: the names in the file, by new name."""
    return RangedRenamedFile(file, names) if isinstance(file, RangedFile) else RenamedFile(file, names)
