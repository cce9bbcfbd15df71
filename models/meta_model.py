"""Build a checkpoint's model on the meta device, without memory, before its weights are read."""

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from conf.errors import UserError
from models.causal_lm import CausalLM, ModelShape
from models.formats.base import Checkpoint, WeightFile
from models.formats.joined_experts import split_experts
from models.formats.partition import expected_tensors
from models.formats.renamed import renamed
from models.layers.linear import tied_embedding
from models.registry import Architecture
from models.weights import embedding_name, full_names, head_name, parameter_shapes

log = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".pdparams")
TIED_CODES = "tied_head_codes"
"""Entry of config.json: the head's codes give the embedding, whose values the files hold in floats too."""
VALUES_PER_BYTE = 8  # the upper bound of all formats: the bitmask of sparse weights has one bit per zero weight


def open_model(
    architecture: Architecture, shape: ModelShape, checkpoint: Checkpoint | None
) -> tuple[CausalLM, list[WeightFile]]:
    """Return the model on the meta device, and its opened weight files. There are no files without a `checkpoint`.

    If a tied model's files hold only the head, or with TIED_CODES, the head is also used as the embedding. If they hold
    a head that differs from the embedding, the model is untied, as in transformers 5, and a warning is logged. Raises
    UserError as `build_meta_model` does, and for files that cannot be opened.
    """
    has_tied_codes = checkpoint is not None and checkpoint.config.get(TIED_CODES, bool, False)
    if has_tied_codes:
        shape = replace(shape, tie_word_embeddings=True)
    model = build_meta_model(architecture, shape, checkpoint)
    if checkpoint is None:
        return model, []
    files = _open_files(checkpoint, model)
    if has_tied_codes:
        return model, [_with_head_as_embedding(file, model) for file in files]
    if tied_embedding(model.head) is None:
        return model, files
    embedding = embedding_name(model)
    head_weight = head_name(model)
    stored = _stored_tensors(files, model)
    if head_weight in stored and embedding not in stored:
        return model, [_with_renamed(file, stored[head_weight][1], embedding) for file in files]
    if not {head_weight, embedding} <= stored.keys():
        return model, files
    untied = build_meta_model(architecture, replace(shape, tie_word_embeddings=False), checkpoint)
    files = _open_files(checkpoint, untied)
    stored = _stored_tensors(files, untied)
    head, weight = (next(file.read([name]))[1] for file, name in (stored[head_weight], stored[embedding]))
    if torch.equal(head.to(weight.dtype), weight):
        return model, files
    log.warning(
        "the config in %s ties the head to the embedding, but the files hold a different %s: the stored head is used, as "
        "with tie_word_embeddings=false",
        checkpoint.path,
        head_weight,
    )
    return untied, files


def _open_files(checkpoint: Checkpoint, model: CausalLM) -> list[WeightFile]:
    expected = expected_tensors(model)
    return split_experts(checkpoint.open_weights(expected), expected, model.layout.joined_experts)


def _with_head_as_embedding(file: WeightFile, model: CausalLM) -> WeightFile:
    head, embedding = f"{model.layout.head}.", f"{model.layout.embedding}."
    stored_names = [name for name in file.shapes if name != embedding_name(model)]
    names = {embedding + name.removeprefix(head) if name.startswith(head) else name: name for name in stored_names}
    return renamed(file, names)


def _with_renamed(file: WeightFile, old: str, new: str) -> WeightFile:
    names = {new if name == old else name: name for name in file.shapes}
    return renamed(file, names) if old in file.shapes else file


def _stored_tensors(files: list[WeightFile], model: CausalLM) -> dict[str, tuple[WeightFile, str]]:
    """Return the file and the stored name of each tensor, by the model's name."""
    names = full_names(parameter_shapes(model))
    return {names.get(name, name): (file, name) for file in files for name in file.shapes}


def build_meta_model(architecture: Architecture, shape: ModelShape, checkpoint: Checkpoint | None) -> CausalLM:
    """Build the model of `shape` on the meta device.

    checkpoint: its file sizes bound the model's size; None, or a checkpoint without weights, sets no bound. Raises
    UserError as soon as the model has more values than the files can hold, so that a damaged config fails quickly.
    """
    num_bytes = 0 if checkpoint is None else _weight_bytes(checkpoint.path)
    bound = _ValueLimit(VALUES_PER_BYTE * num_bytes) if num_bytes else nullcontext()
    try:
        with torch.device("meta"), bound:
            return architecture.build(shape)
    except _TooManyValuesError:
        assert checkpoint is not None
        checkpoint.open_weights({})  # raises an error if the files themselves are damaged
        raise UserError(
            f"{checkpoint.path} does not hold the model that its config describes: a model of {shape.num_hidden_layers} layers "
            f"with more values than {num_bytes} bytes of weights can hold"
        ) from None


def _weight_bytes(path: Path) -> int:
    """Return the total size of the weight files in a folder and its rank folders, or in the folder of a file."""
    folder, patterns = (path, ("*", "rank_*/*")) if path.is_dir() else (path.parent, ("*",))
    files = (file for pattern in patterns for file in folder.glob(pattern))
    return sum(file.stat().st_size for file in files if file.suffix in WEIGHT_SUFFIXES and file.is_file())


class _TooManyValuesError(Exception):
    pass


class _ValueLimit(TorchFunctionMode):
    """Counts the values of the tensors that this thread creates while it is active, and raises above a limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._remaining = limit

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.empty and isinstance(result, Tensor):
            self._remaining -= result.numel()
            if self._remaining < 0:
                raise _TooManyValuesError
        return result
