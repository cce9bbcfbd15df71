"""Read PaddleNLP's layout: `model_state*.pdparams` or safetensors with [inputs, outputs] weights.

The files are whole, sharded, or one for each rank. The result is in Hugging Face's terms: config.json keys, and whole
weights with its names, shapes and row order.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader, read_json
from models.formats.base import Checkpoint, ExpectedTensor, ExpectedTensors, WeightFile
from models.formats.huggingface import GENERATION_CONFIG, SafetensorsFile, weight_names
from models.formats.paddle.config import config_file, paddle_prefix, read_paddle_config
from models.formats.paddle.names import Names, TensorPart
from models.formats.paddle.pickle_reader import PdparamsFile
from models.formats.paddle.scales import CodedFile, read_scales
from models.formats.paddle.smooth import SmoothedFile
from models.formats.ranks import JoinedRanks, in_order
from models.tokenizers import load_tokenizer

PICKLE = ".pdparams"
WHOLE_FILES = ("model.safetensors", "model_state.safetensors", f"model_state{PICKLE}")
RANK = re.compile(r"(?:model|model_state)\.(?:tp([0-9]{2,5}))?_?(?:pp([0-9]{2,5}))?\.(?:safetensors|pdparams)")


def is_paddle_layout(folder: Path) -> bool:
    """Return whether the weights are `.pdparams`, or safetensors with PaddleNLP's prefix in their tensor names."""
    paths = [path for rank in rank_files(folder) for path in rank]
    if not paths or paths[0].suffix == PICKLE:
        return bool(paths)
    prefix = paddle_prefix(folder)
    return prefix is not None and any(_has_prefix(path, prefix) for path in paths)


def _has_prefix(path: Path, prefix: str) -> bool:
    try:
        return any(name.startswith(prefix) for name in SafetensorsFile(path).shapes)
    except UserError:
        return False  # opening the file later gives the error


def open_paddle(folder: Path, allow_pickle: bool) -> Checkpoint:
    """Open a folder.

    Raises UserError if the config cannot be read, or has settings that the architectures here do not compute.
    """
    config, names = read_paddle_config(folder)
    scales = read_scales(folder, config, names)
    values = {key: value for key, value in config.values.items() if key != "quantization_config"}
    if scales is not None:
        values["quantization_config"] = scales.config()

    def open_weights(expected: ExpectedTensors) -> list[WeightFile]:
        files = open_paddle_files(folder, allow_pickle, names, expected)
        if scales is None:
            return [files]
        if not scales.is_smoothed:
            return [CodedFile(files, scales)]
        heads = config.count("num_attention_heads")
        smoothed = SmoothedFile(files, scales, expected, heads, config.count("num_key_value_heads", heads))
        return [CodedFile(smoothed, smoothed.scales)]

    return Checkpoint(
        folder,
        ConfigReader(values, str(config_file(folder))),
        read_json(folder / GENERATION_CONFIG),
        open_weights,
        partial(load_tokenizer, folder),
    )


def open_paddle_files(folder: Path, allow_pickle: bool, names: Names, expected: ExpectedTensors) -> "JoinedParts":
    """Open all files as one.

    Raises UserError if a file is missing or damaged, if slices do not fit, or if pickles are not allowed.
    """
    paths = rank_files(folder)
    if paths[0][0].suffix == PICKLE and not allow_pickle:
        raise UserError(
            f"{folder} has only pickled weights ({paths[0][0].name}), which can hold code: save them as safetensors, "
            "or give model.allow_pickle=true to read its arrays, without running code"
        )
    kind = PdparamsFile if paths[0][0].suffix == PICKLE else SafetensorsFile
    ranks = [[PartsFile(kind(path), names) for path in rank] for rank in paths]
    return JoinedParts(JoinedRanks(paths[0][0], ranks, _expected_parts(names, expected)), names, expected)


def rank_files(folder: Path) -> list[list[Path]]:
    """Return the files of each rank, first pipeline stage first.

    Whole weights are one rank. Returns an empty list if there are no weights.
    """
    for file_name in WHOLE_FILES:
        if shards := weight_names(folder, file_name):
            return [[folder / name for name in shards]]
    stages: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := RANK.fullmatch(path.name):
            registered = stages.setdefault(int(match[2] or 0), {}).setdefault(int(match[1] or 0), path)
            if registered != path:
                names = " and ".join(sorted((registered.name, path.name)))
                raise UserError(f"{folder}: {names} are of the same rank: keep one of them")
    in_stages = in_order(stages, f"{folder}: the file of pipeline stage {{}}")
    ranks = [[path] for stage in in_stages for path in in_order(stage, f"{folder}: the file of rank {{}}")]
    pickles = sorted(folder.glob(f"*{PICKLE}"))
    return ranks or ([pickles] if len(pickles) == 1 else [])


class PartsFile:
    """A file's tensors with Hugging Face's names. Linear weights are [outputs, inputs]; fused weights are split."""

    def __init__(self, file: WeightFile, names: Names) -> None:
        self.path, self.is_mapped = file.path, file.is_mapped
        self._file = file
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._sources: dict[str, tuple[str, bool, TensorPart]] = {}
        for source, stored in file.shapes.items():
            is_transposed = names.is_transposed(source, stored)
            shape = stored[::-1] if is_transposed else stored
            try:
                parts = [*names.parts(source, shape)]
            except ValueError as error:
                raise UserError(f"{self.path}: {error}") from error
            for part in parts:
                if part.name in self.shapes:
                    raise UserError(f"{self.path} has {part.name} twice: under two names, or also in a fused tensor")
                sizes = list(shape)
                for row_slice in part.slices:
                    sizes[part.axis] = row_slice.of(sizes[part.axis])
                self.shapes[part.name] = tuple(sizes)
                dtype = file.dtypes[source]
                self.dtypes[part.name] = torch.bfloat16 if dtype == torch.uint16 else dtype  # numpy has no bfloat16
                self._sources[part.name] = source, is_transposed, part

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            source, is_transposed, part = self._sources[name]
            for _, tensor in self._file.read([source]):
                rows = (tensor.T if is_transposed else tensor).view(self.dtypes[name])
                for row_slice in part.slices:
                    units = rows.unflatten(part.axis, (row_slice.groups, row_slice.units, -1))
                    chosen = units.narrow(part.axis + 1, row_slice.start, row_slice.stop - row_slice.start)
                    rows = chosen.flatten(part.axis, part.axis + 2)
                yield name, rows.contiguous()


class JoinedParts:
    """All ranks as one file. Matrices that the model fuses are joined."""

    is_mapped = False

    def __init__(self, ranks: JoinedRanks, names: Names, expected: ExpectedTensors) -> None:
        self.path = ranks.path
        self._ranks, self._names = ranks, names
        model_parts = {name: tuple(names.parts_of(name)) for name in expected}
        self._parts = {name: parts for name, parts in model_parts.items() if ranks.shapes.keys() >= {*parts}}
        used = {part for parts in self._parts.values() for part in parts}
        self._parts |= {
            name: (name,) for name in ranks.shapes if name not in used
        }  # unexpected tensors are rejected elsewhere
        self.shapes = {name: self._shape(name) for name in self._parts}
        self.dtypes = {name: ranks.dtypes[parts[0]] for name, parts in self._parts.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            parts = [tensor for _, tensor in self._ranks.read(self._parts[name])]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
            yield name, tensor.T.contiguous() if self._names.keeps_transposed(name, tuple(tensor.shape)) else tensor

    def _shape(self, name: str) -> tuple[int, ...]:
        shapes = [self._ranks.shapes[part] for part in self._parts[name]]
        joined_shape = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
        return joined_shape[::-1] if self._names.keeps_transposed(name, joined_shape) else joined_shape


def _expected_parts(names: Names, expected: ExpectedTensors) -> dict[str, ExpectedTensor]:
    """Return the tensors that the ranks' parts must form, with linear weights as [outputs, inputs]."""
    parts_expected = {}
    for name, tensor in expected.items():
        shape, shard_axes = tensor.shape, tensor.shard_axes
        if names.keeps_transposed(name, shape):
            shape, shard_axes = shape[::-1], tuple(1 - cut for cut in shard_axes)
        parts = names.parts_of(name)
        for part, count in parts.items():
            rows = (shape[0] * count // sum(parts.values()),) if shape else ()
            parts_expected[part] = ExpectedTensor((*rows, *shape[1:]), shard_axes if len(parts) == 1 else (0,))
    return parts_expected
