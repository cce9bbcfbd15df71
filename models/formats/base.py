"""A checkpoint of any layout, presented in Hugging Face's terms: config.json's keys, and weights by its names and shapes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from models.config import ConfigReader
from models.tokenizers import Tokenizer

Shapes = Mapping[str, tuple[int, ...]]
CODE_GROUP = 32  # values of a row that share a scale in CodedWeights


class WeightFile(Protocol):
    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    """As `read` gives them."""
    is_mapped: bool
    """Whether what is read are views of the file, so that it must be copied to be kept."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]: ...


@runtime_checkable
class CodedWeights(WeightFile, Protocol):
    """A file whose weights may be small integers with scales, which it gives as they are where that is asked for."""

    def coded_modules(self) -> dict[str, int]:
        """The modules whose weights are such, and the bits of the integers."""

    def keep_codes(self, modules: Iterable[str]) -> None:
        """From now on gives `codes` int8 [O, I] and `scales` float16 [O, I / CODE_GROUP] of these in place of their `weight`."""


@dataclass(frozen=True)
class Checkpoint:
    """What every layout's `open` gives. Weights and tokenizer are opened when asked for, because not every run wants them."""

    path: Path
    """The folder, or the file where one holds everything."""
    config: ConfigReader
    generation_config: dict[str, Any]
    """generation_config.json's keys; empty where the layout has none."""
    open_weights: Callable[[Shapes], list[WeightFile]]
    """Takes the shapes of the model's parameters, by which layouts in pieces are joined; the others do not look at them."""
    load_tokenizer: Callable[[], Tokenizer | None]
