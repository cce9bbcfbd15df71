"""Read Hugging Face's layout: config.json, and safetensors or (if allowed) pickles, whole or sharded."""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from conf.errors import UserError
from conf.support.signals import interrupts_waiting
from models.config import ConfigReader, read_json
from models.formats.base import Checkpoint, ExpectedTensors, WeightFile
from models.formats.bitmask import dense_config, dense_files
from models.formats.bitsandbytes import float_config, float_files
from models.formats.mxfp4 import packed_config
from models.formats.renamed import renamed
from models.formats.safetensors_writer import SAFETENSORS_DTYPES
from models.formats.wrapper import is_wrapper, text_config, text_files
from models.sharding import Shard
from models.tokenizers import Tokenizer, load_tokenizer

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
MODELOPT_CONFIG = "hf_quant_config.json"


def open_huggingface(folder: Path, allow_pickle: bool) -> Checkpoint:
    """Open the checkpoint in a folder; only the text model if it is multimodal."""
    values = _with_modelopt(ConfigReader.from_folder(folder).values, folder)
    config = ConfigReader(float_config(packed_config(dense_config(values))), str(folder / CONFIG))

    def open_files() -> list[WeightFile]:
        return float_files(dense_files(open_weight_files(folder, allow_pickle)))

    generation_config = read_json(folder / GENERATION_CONFIG)
    return checkpoint_of(folder, config, generation_config, open_files, partial(load_tokenizer, folder))


def _with_modelopt(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return config.json with the quantisation that some versions of ModelOpt write only to a file of their own."""
    section, stored = values.get("quantization_config"), read_json(folder / MODELOPT_CONFIG).get("quantization")
    if not isinstance(stored, dict) or isinstance(section, dict) and "quant_method" in section:
        return values
    return values | {"quantization_config": stored | {"quant_method": "modelopt"}}


def checkpoint_of(
    path: Path,
    config: ConfigReader,
    generation_config: dict[str, Any],
    open_files: Callable[[], list[WeightFile]],
    tokenizer: Callable[[], Tokenizer | None],
) -> Checkpoint:
    """Return a checkpoint with these parts; only the text model if it is multimodal."""
    is_multimodal = is_wrapper(config.values)

    def open_weights(expected: ExpectedTensors) -> list[WeightFile]:
        files = open_files()
        return [_with_dense_names(file, expected) for file in (text_files(files) if is_multimodal else files)]

    model_config = text_config(config.values, str(path / CONFIG)) if is_multimodal else config
    return Checkpoint(path, model_config, generation_config, open_weights, tokenizer)


def _with_dense_names(file: WeightFile, expected: ExpectedTensors) -> WeightFile:
    """Return the file with the names that a model `expected`, if transformers wrote dense layers of Kimi Linear with the
    name of mixtures."""
    dense = {name: name.replace(".block_sparse_moe.", ".mlp.") for name in file.shapes if name not in expected}
    names = {dense[name] if dense.get(name) in expected else name: name for name in file.shapes}
    return file if names.keys() == file.shapes.keys() else renamed(file, names)


class SafetensorsFile:
    is_mapped = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                self.shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
                codes = {name: tensor.get_dtype() for name, tensor in slices.items()}
                self.metadata: dict[str, str] = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is truncated or not a safetensors file: {error}") from error
        if unknown := next((name for name, code in codes.items() if code not in SAFETENSORS_DTYPES), None):
            raise UserError(f"{path}: {unknown} has the dtype {codes[unknown]}, which is not supported")
        self.dtypes = {name: SAFETENSORS_DTYPES[code] for name, code in codes.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            # Opened once per tensor, because the pages of a mapping stay resident while it is open.
            with safe_open(self.path, framework="pt") as file:
                with interrupts_waiting():
                    tensor = file.get_tensor(name)
                yield name, tensor

    def read_ranges(self, name: str, shard: Shard) -> Tensor:
        with interrupts_waiting(), safe_open(self.path, framework="pt") as file:
            tensor, before = file.get_slice(name), (slice(None),) * shard.axis
            parts = [tensor[(*before, slice(indices.start, indices.stop))] for indices in shard.ranges]
            return torch.cat(parts, shard.axis)

    def read_whole(self) -> tuple[dict[str, Tensor], bytes]:
        """Return copies of all tensors of a small file, and the file's bytes.

        Raises UserError if the file has changed since it was opened.
        """
        try:
            content = self.path.read_bytes()
            tensors = load(content)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.path} is truncated or not a safetensors file: {error}") from error
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != self.shapes:
            raise UserError(f"{self.path} was changed while it was read: start again")
        return tensors, content


class PickleFile:
    """A `.bin` file of torch.save. It is read with weights_only=True, which loads tensors and runs no code."""

    is_mapped = True

    def __init__(self, path: Path) -> None:
        self.path = path
        tensors = self._load()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        tensors = self._load()
        for name in names:
            yield name, tensors[name]

    def _load(self) -> dict[str, Tensor]:
        try:
            tensors: dict[str, Tensor] = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a damaged pickle can raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(f"{self.path} is truncated, too old, or holds more than tensors ({reason})") from error
        named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
        if not named or not all(isinstance(tensor, Tensor) and not tensor.is_sparse for tensor in tensors.values()):
            raise UserError(f"{self.path} does not hold a dictionary of dense tensors")
        return tensors


def open_weight_files(folder: Path, allow_pickle: bool) -> list[WeightFile]:
    """Open the weight files of a folder.

    Raises UserError if there are none, if one is missing or damaged, or if pickles are not allowed.
    """
    if names := weight_names(folder, WEIGHTS):
        return [SafetensorsFile(folder / name) for name in names]
    if names := weight_names(folder, "pytorch_model.bin") or _only_pickle(folder):
        if not allow_pickle:
            raise UserError(
                f"{folder} has only pickled weights ({names[0]}), which can hold code: convert them to safetensors, "
                "or give model.allow_pickle=true to read them with weights_only=True"
            )
        return [PickleFile(folder / name) for name in names]
    raise UserError(
        f"{folder} has no weights: expected model.safetensors, or model.safetensors.index.json and its shards"
    )


def _only_pickle(folder: Path) -> list[str]:
    names = [file.name for file in sorted(folder.iterdir()) if file.suffix in (".bin", ".pt", ".pth")]
    return names if len(names) == 1 else []


def weight_names(folder: Path, file_name: str) -> list[str]:
    """Return `file_name`, or the names of the shards in its index; an empty list if the folder has neither.

    Raises UserError for an invalid index or a missing shard.
    """
    if (folder / file_name).is_file():
        return [file_name]
    index = folder / f"{file_name}.index.json"
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} cannot be read: {type(error).__name__}: {error}") from error
    if not names:
        raise UserError(f"{index} names no files")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{index} names {name!r}, which is not a file of its own folder")
        if not (folder / name).is_file():
            raise UserError(f"{index} names {name}, which is missing in {folder}")
    return names
