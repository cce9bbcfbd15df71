"""A checkpoint of any layout in Hugging Face's terms: the keys of config.json, and weights under Hugging Face's names and shapes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from models.config import ConfigReader
from models.sharding import Shard
from models.tokenizers import Tokenizer

CODE_GROUP = 32  # values of a row that share a scale in CodedWeights


@dataclass(frozen=True)
class ExpectedTensor:
    """The shape and kind that a model expects of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    shard_axes: tuple[int, ...] = ()
    """The dimensions along which tensor parallelism may have cut it; none where its slices cannot be put together one after the other."""


ExpectedTensors = Mapping[str, ExpectedTensor]
"""By name all tensors of a model."""


class WeightFile(Protocol):
    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    """Dtypes of the tensors that `read` gives."""
    is_mapped: bool
    """Whether `read` gives views of the file, which must be copied to be kept."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]: ...


@runtime_checkable
class RangedFile(WeightFile, Protocol):
    """A file that reads a part of a tensor without the rest."""

    def read_ranges(self, name: str, shard: Shard) -> Tensor:
        """Return a part of a tensor, in memory of its own."""


@runtime_checkable
class CodedWeights(WeightFile, Protocol):
    """A file with weights of small integer codes and scales. It gives floats, or the codes where these are asked for."""

    def coded_modules(self) -> dict[str, str]:
        """Return ggml's name of the type of each weight that has codes, by its module."""

    def keep_codes(self, modules: Iterable[str]) -> None:
        """Make `read` give `codes` int8 [O, I] and `scales` float16 [O, I / CODE_GROUP] of these modules instead of their `weight`.

        Of types that layers hold in blocks it gives these alone: `blocks` uint8 [O, bytes of a row].
        """


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was opened. Weights and tokenizer are opened when asked for, because not every run wants them."""

    path: Path
    """The folder, or the file if one file holds everything."""
    config: ConfigReader
    generation_config: dict[str, Any]
    """Keys of generation_config.json; empty where the layout has none."""
    open_weights: Callable[[ExpectedTensors], list[WeightFile]]
    """Opens the weight files. Layouts in pieces join them by what the model expects, which they are given."""
    load_tokenizer: Callable[[], Tokenizer | None]
