"""export.json: the properties of an exported model that the engine needs in addition to its graph and weights.

The file is untrusted input; `describe.py` writes it. For a sharded model it holds the parallel layout, and each rank's
own export.json is in a subfolder.

N blocks of B slots, G key/value heads.
"""

import hashlib
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError, shortened
from kernels import build
from kernels.kv_format import PARTS, PagedVectors, allocate
from models.batch import KVCache, LayerState, StateShape, StateShapes, join_cache
from models.capabilities import ModelCapabilities
from models.causal_lm import CacheContent, ModelShape
from models.config import ConfigReader
from models.exported.functions import schemas
from models.exported.shard import ExportedShard, read_part
from models.layers.attention import Heads
from models.sharding import ParallelLayout
from models.weights import DTYPES

EXPORT, GRAPH, ADAPTED_GRAPH, WEIGHTS = "export.json", "graph.pt2", "adapted.pt2", "weights.safetensors"
REMEDY = "export the model again with task=export"


@dataclass(frozen=True)
class ExportedShape(ModelShape):
    """The config of an exported model, whose code is not available."""

    max_tokens: int
    """The maximum number of tokens of a sequence."""
    capabilities: ModelCapabilities = ModelCapabilities()

    @property
    def context_length(self) -> int:
        return self.max_tokens


@dataclass(frozen=True)
class CacheFormat:
    """The cache format of a layer's keys or values."""

    num_heads: int
    channels: int
    format: str
    """The name of a format in kernels/kv_format."""
    scales: str | None
    """The name of the static scales among the weights. None: no static scales."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer."""

    num_bytes: int
    num_experts: int
    num_experts_per_tok: int


@dataclass(frozen=True)
class Description:
    """The content of export.json for a whole model, or for a rank's part."""

    shape: ExportedShape
    hidden_size: int
    embedding_dim: int
    dtype: torch.dtype
    cache_formats: list[CacheFormat]
    """Keys and values of each attention layer, alternating."""
    attends: list[bool]
    """Whether each layer has keys and values."""
    states: list[StateShapes]
    """The states of each layer."""
    windows: list[int | None]
    """The window of each layer of the whole model, as in `CacheContent`."""
    step_bytes: int
    """The bytes of weights that every decode step reads."""
    mixtures: list[Mixture]
    quant: dict[str, Any]
    """The fields of QuantConfig with which the model was exported."""
    weights: list[str]
    """The names of the weights, in the order of the graph's inputs."""
    constants: list[str]
    """The names of the entries of `weights` that are not model weights, such as frequencies."""
    adapted_weights: list[str]
    """The names of the weights of the graph with adapters, in the order of its inputs."""
    linears: dict[str, tuple[int, int]]
    """The outputs and inputs of the linear layers that can have adapters, by name, in the order of the graph's inputs.
    """
    head: str
    """The name of the model's head."""
    sha256: dict[str, str]
    """The sha256 of the graph files, by file name."""
    prompt_marks: list[list[int]]
    """As in `CausalLM.prompt_marks`."""
    part: ExportedShard | None
    """The part of a sharded model. None: the model is whole."""

    @property
    def parallel_layout(self) -> ParallelLayout:
        return ParallelLayout() if self.part is None else self.part.parallel_layout

    def empty_cache(self, weights: dict[str, Tensor]) -> KVCache:
        """Return the cache of all layers on the meta device, without blocks and slots.

        weights: the weights by name. Raises KeyError or ValueError.
        """
        vectors = (_vectors(cache_format, self.dtype, weights) for cache_format in self.cache_formats)
        meta = torch.device("meta")
        layers = [
            join_cache(
                (next(vectors), next(vectors)) if attends else None,
                LayerState(tuple(torch.empty(0, *state.shape, dtype=state.dtype, device=meta) for state in states)),
            )
            for attends, states in zip(self.attends, self.states, strict=True)
        ]
        return KVCache(layers, 0, 1, self.dtype)

    @property
    def layer_caches(self) -> list[CacheContent]:
        """The content of each layer's cache, as in `CausalLM.layer_caches`."""
        heads, layers = iter(self._heads), zip(self.attends, self.states, self.local_windows, strict=True)
        return [CacheContent(next(heads) if attends else None, states, window) for attends, states, window in layers]

    @property
    def local_windows(self) -> list[int | None]:
        """The window of each layer of this part."""
        layers = range(len(self.windows)) if self.part is None else self.part.local_layers
        return self.windows[layers.start : layers.stop]

    @property
    def _heads(self) -> list[Heads]:
        """The heads of each attention layer's keys and values. The numbers of query heads are fixed in the graph."""
        heads = [
            Heads(keys.num_heads, keys.num_heads, keys.channels, values.channels)
            for keys, values in zip(self.cache_formats[::2], self.cache_formats[1::2], strict=True)
        ]
        return heads if self.part is None else self.part.with_positions(heads)


def part_folder(folder: Path, parallel_layout: ParallelLayout) -> Path:
    """Return the folder of a rank's part of an exported model."""
    return folder if parallel_layout.tp * parallel_layout.pp == 1 else folder / f"rank_{parallel_layout.rank}"


def _check_machine(reader: ConfigReader, folder: Path) -> None:
    exported_for, here = reader.require("instruction_set", str), instruction_set()
    if exported_for != here:
        raise UserError(f"{folder} was exported for {exported_for!r}, and this machine has {here}: {REMEDY} here")
    current, exported = schemas(), reader.require("operators", dict)  # an older graph does not list newer operators
    if changed := sorted(name for name in exported if exported[name] != current.get(name)):
        raise UserError(f"{folder} was exported with other operators ({', '.join(changed)[:80]}): {REMEDY}")


def _read_shape(reader: ConfigReader) -> ExportedShape:
    try:
        return ExportedShape(
            reader.count("vocab_size"),
            reader.num_layers(),
            reader.require("tie_word_embeddings", bool),
            reader.count("context_length"),
            ModelCapabilities(
                needs_whole_prompt=reader.require("needs_whole_prompt", bool),
                keys_depend_on_length=reader.require("keys_depend_on_length", bool),
                long_rope_threshold=None if reader.raw("key_border") is None else reader.count("key_border"),
                has_windows=reader.require("has_windows", bool),
                prefix_stops_scaling=reader.require("prefix_stops_scaling", bool),
                is_recurrent=reader.raw("states") is not None,
            ),
        )
    except UserError as error:  # also raised for a folder that an older version exported
        raise UserError(f"{error}: {REMEDY}") from error


def read_description(folder: Path, rank: int = 0) -> Description:
    """Read export.json, and for a sharded model the export.json of the rank.

    Raises UserError for a damaged file, and for an export for another instruction set or with other operators.
    """
    reader = ConfigReader.from_folder(folder, EXPORT)
    if reader.raw("tp") is None:
        return _read(folder, reader)
    tp, pp, sha256 = reader.count("tp"), reader.count("pp"), reader.require("sha256", dict)
    parallel_layout = ParallelLayout(tp, pp, rank % tp, rank // tp)
    rank_folder = part_folder(folder, parallel_layout)
    try:
        if sha256_of(rank_folder / EXPORT) != sha256.get(str((rank_folder / EXPORT).relative_to(folder))):
            raise UserError(f"{rank_folder / EXPORT} is damaged (its sha256 is not the one in {EXPORT}): {REMEDY}")
    except OSError as error:
        raise UserError(f"{rank_folder / EXPORT} is damaged ({error.strerror}): {REMEDY}") from error
    description = _read(rank_folder, ConfigReader.from_folder(rank_folder, EXPORT))
    if description.parallel_layout != parallel_layout:
        raise UserError(f"{rank_folder / EXPORT} is damaged (it is for {description.parallel_layout}): {REMEDY}")
    return description


def sha256_of(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(folder: Path, reader: ConfigReader) -> Description:
    _check_machine(reader, folder)
    dtype = reader.expect("dtype", tuple(DTYPES), None)
    shape = _read_shape(reader)
    try:
        cache_formats, attends, states = _read_cache(reader, dtype)
        windows = _read_windows(reader, shape.num_hidden_layers)
        mixtures = [Mixture(**entry) for entry in reader.raw("mixtures")]
        weights, constants, adapted = ([*reader.raw(key)] for key in ("weights", "constants", "adapted_weights"))
        linears = {name: (outputs, inputs) for name, (outputs, inputs) in reader.require("linears", dict).items()}
        sha256 = {file: reader.require("sha256", dict)[file] for file in (GRAPH, ADAPTED_GRAPH)}
        _check_counts(cache_formats, mixtures, linears)
        prompt_marks = [[*ids] for ids in reader.raw("prompt_marks", [])]
        if any(type(token) is not int for token in itertools.chain(reader.raw("eos_token_ids"), *prompt_marks)):
            raise ValueError("eos_token_ids or prompt_marks are not integers")
        part = reader.raw("part")
        num_attention_layers = len(cache_formats) // 2
        part = None if part is None else read_part(part, shape.num_hidden_layers, num_attention_layers, linears)
        num_layers = shape.num_hidden_layers if part is None else len(part.local_layers)
        names = *weights, *constants, *adapted, *sha256.values()
        if len(states) != num_layers or any(type(name) is not str for name in names):
            raise ValueError("it lacks keys or values of a layer, or a weight has no name")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / EXPORT} is damaged ({error}): {REMEDY}") from error
    description = Description(
        shape,
        reader.count("hidden_size"),
        reader.count("embedding_dim"),
        DTYPES[dtype],
        cache_formats,
        attends,
        states,
        windows,
        reader.count("step_bytes", bits=48),
        mixtures,
        reader.require("quant", dict),
        weights,
        constants,
        adapted,
        linears,
        reader.require("head", str),
        sha256,
        prompt_marks,
        part,
    )
    if unread := reader.unread():
        raise UserError(f"{folder / EXPORT} has unknown keys ({shortened(', '.join(unread))}): {REMEDY}")
    return description


def _read_cache(reader: ConfigReader, dtype: str) -> tuple[list[CacheFormat], list[bool], list[StateShapes]]:
    """Read the keys and values of the attention layers, alternating; for each layer, whether it has them; its states.

    A layer that reads an earlier layer's keys and values has none. Raises TypeError, KeyError or ValueError for an entry
    of another form.
    """
    entries = [None if entry is None else CacheFormat(**entry) for entry in reader.raw("cache")]
    by_layer = reader.raw("states")
    has_states = by_layer is not None
    by_layer = by_layer if has_states else [[]] * (len(entries) // 2)
    states: list[StateShapes] = [tuple(_read_state(entry, dtype) for entry in layer) for layer in by_layer]
    if len(entries) != 2 * len(states):
        raise ValueError(f"cache has {len(entries)} entries, expected two for each of {len(states)} layers")
    attends = [keys is not None for keys in entries[::2]]
    for number, (has_keys, values) in enumerate(zip(attends, entries[1::2], strict=True)):
        # a layer after the first may read an earlier layer's keys and values
        if has_keys != (values is not None) or not (has_keys or has_states or number):
            raise ValueError(f"layer {number} needs keys and values, or states")
    return [entry for entry in entries if entry is not None], attends, states


def _read_windows(reader: ConfigReader, num_layers: int) -> list[int | None]:
    """Read the window of each layer. An export of an earlier version has no windows: its layers have the same blocks."""
    windows = reader.raw("windows", [None] * num_layers)
    are_counts = (window is None or type(window) is int and 0 < window < 2**31 for window in windows)
    if len(windows) != num_layers or not all(are_counts):
        raise ValueError(f"windows are not null or a number above 0 for each of {num_layers} layers")
    return [*windows]


def _read_state(entry: dict[str, Any], dtype: str) -> StateShape:
    shape = tuple(entry["shape"])
    if any(type(size) is not int or size < 1 for size in shape) or math.prod(shape) >= 2**31:
        raise ValueError(f"a state has the shape {str(shape)[:40]}, expected 1 to 2**31 - 1 numbers")
    if entry["dtype"] not in (dtype, "float32"):
        raise ValueError(f"a state has the dtype {str(entry['dtype'])[:40]}, expected {dtype} or float32")
    return StateShape(shape, getattr(torch, entry["dtype"]))


def _check_counts(
    cache_formats: list[CacheFormat], mixtures: list[Mixture], linears: dict[str, tuple[int, int]]
) -> None:
    counts = [cache_format.num_heads for cache_format in cache_formats]
    counts += [number for mixture in mixtures for number in vars(mixture).values()]
    counts += [number for shape in linears.values() for number in shape]
    if any(type(number) is not int or not 0 < number < 2**48 for number in counts):
        raise ValueError("a count is not a number above 0")
    if any(
        type(cache_format.channels) is not int or not 0 <= cache_format.num_heads * cache_format.channels < 2**24
        for cache_format in cache_formats
    ):
        raise ValueError("heads times channels is not a number below 2**24")


def _vectors(cache_format: CacheFormat, dtype: torch.dtype, weights: dict[str, Tensor]) -> PagedVectors:
    scales = None if cache_format.scales is None else weights[cache_format.scales]
    if scales is not None and (scales.shape != (cache_format.num_heads,) or scales.dtype != torch.float32):
        raise ValueError(f"{cache_format.scales} are not the scales of {cache_format.num_heads} heads")
    format = PARTS.unflatten(((), cache_format.format, scales, cache_format.channels, dtype)).format
    return allocate(format, (0, 1, cache_format.num_heads), cache_format.channels, dtype, torch.device("meta"))


def instruction_set() -> str:
    """Return the instruction set of the kernels; none if they are off."""
    return build.instruction_set() if build.library() is not None else "none"
