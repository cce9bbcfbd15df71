"""A checkpoint of any layout in Hugging Face's terms: config.json keys, and its weight names and shapes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from models.config import ConfigReader
from models.sharding import Shard
from models.tokenizers import Tokenizer


@dataclass(frozen=True)
class ExpectedTensor:
    """The shape that a model expects of a checkpoint tensor, and how other engines may shard it."""

    shape: tuple[int, ...]
    shard_axes: tuple[int, ...] = ()
    """Axes along which tensor parallelism may shard it. Empty if its slices cannot be joined by concatenation."""


ExpectedTensors = Mapping[str, ExpectedTensor]
"""All tensors of a model by name."""


class WeightFile(Protocol):
    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    """Dtypes of the tensors that `read` returns."""
    is_mapped: bool
    """Whether `read` returns views of the file, which the caller must copy to keep."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]: ...


@runtime_checkable
class RangedFile(WeightFile, Protocol):
    """A file that can read a part of a tensor without the rest."""

    def read_ranges(self, name: str, shard: Shard) -> Tensor:
        """Return a copy of a part of a tensor."""


@runtime_checkable
class CodedWeights(WeightFile, Protocol):
    """A file whose weights are small integer codes and scales. It returns floats, or codes after `keep_codes`."""

    def coded_modules(self) -> dict[str, str]:
        """Return the ggml type name of each weight that has codes, by module."""

    def permuted_modules(self) -> set[str]:
        """Return the modules whose codes keep the file's order of input channels, because a block has channels of several
        heads."""

    def keep_codes(self, modules: Iterable[str]) -> None:
        """Make `read` return codes instead of `weight` for these modules.

        It returns `blocks` uint8 [O, bytes per row] as the file has them. NVFP4 blocks also have a `global_scale` float32
        [1], permuted modules a `permutation` int64 [I]: the input channel of each column of the blocks.
        """


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Weights and tokenizer are opened on request, because not every run needs them."""

    path: Path
    """The folder, or the file of a checkpoint with only one file."""
    config: ConfigReader
    generation_config: dict[str, Any]
    """Keys of generation_config.json; empty if the layout has none."""
    open_weights: Callable[[ExpectedTensors], list[WeightFile]]
    """Opens the weight files. Layouts with slices use the expected tensors to join them."""
    load_tokenizer: Callable[[], Tokenizer | None]
