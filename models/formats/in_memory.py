"""A transformers model in memory, as a checkpoint: its weights are read from there, and no file is written."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader
from models.formats.base import Checkpoint, WeightFile
from models.formats.huggingface import checkpoint_of
from models.tokenizers import Tokenizer


class TensorsInMemory:
    """Tensors by name. `read` returns them without a copy, or copies them from a GPU."""

    is_mapped = True  # the caller owns the tensors, so they must be copied to be kept

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self.path = path
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self._tensors[name].detach().cpu()


def name_of(model: Any) -> str:
    """Return the folder or hub id from which a transformers model was loaded, else the name of its class."""
    return str(model.config.name_or_path or type(model).__name__)


def open_in_memory(model: Any, load_tokenizer: Callable[[], Tokenizer | None]) -> Checkpoint:
    """Return the checkpoint that `save_pretrained` of a PreTrainedModel would write.

    Raises UserError for offloaded weights.
    """
    from transformers.core_model_loading import (
        revert_weight_conversion,  # imported here, because a caller that has a model has imported it already
    )

    path = Path(name_of(model))
    values = json.loads(model.config.to_json_string())
    values |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    generation = model.generation_config
    tensors: dict[str, Tensor] = model.state_dict()
    if offloaded := next((name for name, tensor in tensors.items() if tensor.is_meta), None):
        raise UserError(
            f"{offloaded} of the model is not in memory: load the model without offloading, or give its folder"
        )

    def open_files() -> list[WeightFile]:
        return [TensorsInMemory(path, revert_weight_conversion(model, tensors))]

    return checkpoint_of(
        path,
        ConfigReader(values, f"the config of {path}"),
        {} if generation is None else json.loads(generation.to_json_string()),
        open_files,
        load_tokenizer,
    )
