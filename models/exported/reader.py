"""Read a graph in torch's JSON schema. torch's own loader is not used, because it unpickles data from the file.

A file can only call the listed functions, with numbers, weights and earlier results as arguments.
"""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.errors import shortened
from kernels.collectives import Group, nodes
from kernels.kv_format import PARTS, PagedVectors
from kernels.linear.float_weight import FloatWeight
from kernels.linear.int_weight import CODES
from kernels.linear.packed import WeightGroup
from kernels.lora import AdapterTable, lora_add
from kernels.operator import Parts, Schema
from kernels.quantize_rows import Activations
from models.batch import KVCache, attention_cache, layer_states
from models.exported.cache_functions import WINDOW_INDEX_PRODUCERS
from models.exported.functions import INDEX_PRODUCERS, ONLY_CHECKS, function_of
from models.exported.graph import Argument, Call, DamagedGraphError, Graph
from models.layers.lora_target import LoRATarget

MAX_BYTES = 2**28  # of a graph; a graph of 128 layers takes 10 MB
DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
    29: torch.float8_e4m3fn,
}
"""The dtypes by their numbers in torch's schema."""
NUM_FIELDS = len(fields(AdapterTable))
PLAIN_TYPES: dict[str, type | tuple[type, ...]] = {
    "as_int": int,
    "as_float": (int, float),
    "as_bool": bool,
    "as_string": str,
}
PRODUCTS = {"matmul_together": "weights", "matmul_swiglu": "gate", "grouped_matmul": "weights"}
"""Operators that multiply rows `x`, with the name of their weights argument."""
FORMAT_ERRORS = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError, RuntimeError)
"""The errors that a file of another format may cause."""


class Value(NamedTuple):
    """One of a step's values."""

    number: int
    producer: str
    """The field of the batch, or OPERATOR.OUTPUT."""


class TablePart(NamedTuple):
    """A field of one layer's adapter table."""

    layer: int
    field: int


class CacheTensor(NamedTuple):
    """A tensor of the cache's keys and values."""

    number: int


class StateTensor(NamedTuple):
    """A recurrent state of the cache."""

    layer: int
    number: int
    """The number of the tensor in the layer's states."""

    @property
    def producer(self) -> str:
        """The name in `INDEX_PRODUCERS`."""
        return "state"


def read_graph(path: Path, sha256: str) -> dict[str, Any]:
    """Return the JSON graph of a PT2 archive.

    Raises DamagedGraphError for a file without a graph or with another sha256.
    """
    try:
        if not path.is_file():  # reading a pipe would block
            raise DamagedGraphError("it is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise DamagedGraphError(f"it has more than {MAX_BYTES:,} bytes")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise DamagedGraphError("its sha256 is not the one in export.json")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _check_entries(archive.infolist())
            names = [name for name in archive.namelist() if name.endswith("/models/model.json")]
            if len(names) != 1:
                raise DamagedGraphError("it holds no graph")
            text = archive.read(names[0])
        graph: dict[str, Any] = json.loads(text)["graph_module"]["graph"]
        return graph
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DamagedGraphError(f"it is not an archive ({shortened(str(error))})") from error
    except FORMAT_ERRORS as error:
        raise DamagedGraphError(f"it holds no graph ({type(error).__name__}: {shortened(str(error))})") from error


def _check_entries(entries: Sequence[zipfile.ZipInfo]) -> None:
    """Raise DamagedGraphError for entries that torch does not write.

    Compressed entries could be larger than the file.
    """
    names = set[str]()
    for entry in entries:
        name = shortened(repr(entry.filename))
        if entry.filename in names:
            raise DamagedGraphError(f"it has two entries {name}")
        if entry.filename.startswith("/") or ".." in entry.filename.split("/"):
            raise DamagedGraphError(f"its entry {name} is outside of the archive")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise DamagedGraphError(f"its entry {name} is compressed")
        names.add(entry.filename)


def build_graph(
    graph: Mapping[str, Any],
    fields: tuple[str, ...],
    cache: KVCache,
    windows: Sequence[int | None],
    weights: Mapping[str, Tensor],
    embed: Callable[..., Tensor],
    adapted: Sequence[LoRATarget] = (),
    group: Group | None = None,
    quantize_rows: Callable[[Tensor, int], Activations] | None = None,
) -> Graph:
    """Return the calls of a graph, including its weights.

    The graph's inputs are, in this order: the `fields` of a batch, the keys and values of `cache`, its recurrent states,
    `weights`, and the adapter tables of the layers `adapted`. `cache` may have no blocks and slots. `windows`: the window
    of each layer of `cache`. `embed(function, *arguments)` is called for the token embedding. `group`: the group of the
    rank; None: the model is not sharded. `quantize_rows(x, count)` quantises float rows x for products with `count`
    integer weights; None: the product takes floats.

    Raises DamagedGraphError for functions and arguments that are not listed, and for weights that a kernel would read
    out of bounds.
    """
    try:
        return _Builder(graph, fields, cache, windows, weights, embed, adapted, group, quantize_rows).build()
    except FORMAT_ERRORS as error:
        raise DamagedGraphError(f"{type(error).__name__}: {shortened(' '.join(str(error).split()))}") from error


class _Builder:
    def __init__(
        self,
        graph: Mapping[str, Any],
        fields: tuple[str, ...],
        cache: KVCache,
        windows: Sequence[int | None],
        weights: Mapping[str, Tensor],
        embed: Callable[..., Tensor],
        adapted: Sequence[LoRATarget],
        group: Group | None,
        quantize_rows: Callable[[Tensor, int], Activations] | None,
    ) -> None:
        self._quantize_rows, self._num_quantized = quantize_rows, 0
        self._collectives = {} if group is None else _collectives_of(group)
        self._graph, self._fields, self._embed, self._adapted = graph, fields, embed, adapted
        self._layer_vectors = [*chain.from_iterable(cache.attention_layers)]
        self._attention_layers = [n for n, layer in enumerate(cache.layers) if attention_cache(layer) is not None]
        """The places of the attention layers in the cache."""
        self._windows = [windows[number] for number in self._attention_layers]
        self._stored = [
            [*range(start, start + len(vectors.tensors))] for start, vectors in _with_starts(self._layer_vectors)
        ]
        states = (
            StateTensor(number, i) for number, layer in enumerate(cache.layers) for i in range(len(layer_states(layer)))
        )
        stored = *map(CacheTensor, range(len(cache.tensors))), *states
        tables = (TablePart(layer, field) for layer in range(len(adapted)) for field in range(NUM_FIELDS))
        inputs = [*map(Value, range(len(fields)), fields), *stored, *weights.values(), *tables]
        names = [graph_input["as_tensor"]["name"] for graph_input in graph["inputs"]]
        self._values: dict[str, Any] = dict(zip(names, inputs, strict=True))
        self._num_values = len(fields)
        self._sizes: dict[int, Argument] = {}
        """For each value of indices, the number of entries that the indices may address."""

    def build(self) -> Graph:
        calls = [self._call(node) for node in self._graph["nodes"] if node["target"] != ONLY_CHECKS]
        hidden, *logits_numbers = (
            self._values[graph_output["as_tensor"]["name"]].number for graph_output in self._graph["outputs"]
        )
        (logits,) = logits_numbers or [hidden]
        end = 1 + max(number for number, call in enumerate(calls) if hidden in call.outputs)
        return Graph(self._fields, calls[:end], calls[end:], self._num_values, hidden, logits, self._num_quantized)

    def _call(self, node: Mapping[str, Any]) -> Call:
        target = node["target"]
        function = self._collectives.get(target) or function_of(target)
        if function is None:
            raise DamagedGraphError(f"{target!r} is not a function of a model")
        name = target.split(".")[-2]
        values = {argument["name"]: self._parse_argument(argument["arg"]) for argument in node["inputs"]}
        schema: Schema | None = getattr(function, "schema", None)
        arguments, keywords, producer = list[Argument](), dict[str, Argument](), name
        if schema is not None:
            arguments = self._operator_arguments(schema, values)
            if self._quantize_rows is not None and (count := _num_integer_weights(name, values)):
                arguments[0] = _quantized_input(self._quantize_rows, arguments[0], count)
                self._num_quantized += 1
            function = _lora_add if name == "lora_add" else function
            if name == "take_rows" and _is_token_ids(values["numbers"]):
                function = partial(self._embed, function)
        elif name == "index" and [getattr(index, "producer", "") for index in values["indices"]] == ["output_rows"]:
            function, arguments = _output_rows, [_resolved(values["self"]), _resolved(values["indices"][0])]
            producer = f"{getattr(values['self'], 'producer', '')}[output_rows]"
        elif target.startswith("torch."):
            if name == "owned_rows" or name == "embedding" and _is_token_ids(values["indices"]):
                function = partial(self._embed, function)
            keywords = {name: _resolved(value) for name, value in values.items()}
        else:
            arguments = [_resolved(value) for value in values.values()]
        equal = [] if schema is None else self._equal_sizes(name, values)
        outputs, has_one_output = self._outputs(node["outputs"], producer)
        if name in ("route", "route_corrected", "topk"):
            self._sizes[outputs[1]] = _size(values["self" if name == "topk" else "logits"], -1)
        elif name == "group_rows":
            self._sizes |= dict.fromkeys(outputs[1:], _size(Value(outputs[0], ""), 0))
        return Call(node["name"] or target, function, arguments, keywords, outputs, has_one_output, equal)

    def _outputs(self, outputs: Sequence[Mapping[str, Any]], producer: str) -> tuple[list[int], bool]:
        """Return the indices of a node's results, and whether the function returns one value instead of a tuple."""
        names: list[str] = []
        for output in outputs:
            ((kind, value),) = output.items()
            if kind == "as_tensors":
                names += [tensor["name"] for tensor in value]
            elif kind != "as_none":
                names.append(value["name"] if kind == "as_tensor" else value["as_name"])
        if len({*names} - self._values.keys()) != len(names):
            raise DamagedGraphError(f"{names[0]!r} is computed twice")
        first, self._num_values = self._num_values, self._num_values + len(names)
        for index, name in enumerate(names):
            self._values[name] = Value(first + index, f"{producer}.{index}")
        return [*range(first, self._num_values)], len(outputs) == 1 and "as_tensors" not in outputs[0] and bool(names)

    def _parse_argument(self, argument: Mapping[str, Any]) -> Any:
        ((kind, value),) = argument.items()
        if kind == "as_none":
            return None
        if kind in PLAIN_TYPES:
            return _plain_value(kind, value)
        if kind.removesuffix("s") in PLAIN_TYPES:
            return [_plain_value(kind.removesuffix("s"), item) for item in value]
        match kind:
            case "as_tensor":
                return self._values[value["name"]]
            case "as_tensors":
                return [self._values[tensor["name"]] for tensor in value]
            case "as_optional_tensor" | "as_sym_int":
                return self._values[value["as_name"]] if "as_name" in value else self._parse_argument(value)
            case "as_optional_tensors" | "as_sym_ints":
                kind = kind.removesuffix("s")
                return [self._parse_argument({kind: item}) for item in value]
            case "as_scalar_type":
                return DTYPES[value]
            case "as_device" if value["type"] == "cpu":
                return torch.device("cpu")
            case "as_layout" if value == 7:
                return torch.strided
        raise DamagedGraphError(f"{kind!r} is not an argument of a model's function")

    def _operator_arguments(self, schema: Schema, values: dict[str, Any]) -> list[Argument]:
        """Return the arguments of one of Quintet's operators, with compound types rebuilt.

        Arguments that contain only weights are built once.
        """
        arguments = []
        for parts, names in schema.arguments:
            if not values.keys() & {*names}:
                continue
            components = [
                values[name] if name in values else schema.signature.parameters[name].default for name in names
            ]
            if names[0] == "states" and isinstance(components[0], StateTensor):
                arguments.append(_state_argument(*components[0]))
            elif parts is None:
                arguments.append(_resolved(components[0]))
            elif parts is PARTS:
                arguments.append(self._cache_argument(*components))
            elif parts.make is AdapterTable:
                arguments.append(self._table_argument(components))
            elif any(map(_is_computed, components)):
                arguments.append(_compound(parts, [_resolved(component) for component in components]))
            else:
                compound = parts.unflatten(components)
                _check_weights(compound)
                arguments.append(_constant(compound))
        if values.keys() - schema.signature.parameters.keys():
            raise DamagedGraphError(f"{[*values]} are not the arguments of the operator")
        return arguments

    def _table_argument(self, components: list[Any]) -> Argument:
        """Return the argument for a layer's adapter table.

        The argument is None at run time if the layer has no adapters.
        """
        number = components[0].layer if isinstance(components[0], TablePart) else -1
        if components != [TablePart(number, field) for field in range(NUM_FIELDS)]:
            raise DamagedGraphError("an adapter argument is not the adapter table of a layer")
        layer = self._adapted[number]
        return lambda values, cache: layer.adapters

    def _cache_argument(
        self, tensors: list[CacheTensor], format: str, scales: Tensor | None, channels: int, dtype: torch.dtype
    ) -> Argument:
        number = self._place_of(tensors)
        vectors = self._layer_vectors[number]
        narrowed = replace(vectors, channels=channels)
        expected = PARTS.flatten(narrowed)
        is_alike = (format, channels, dtype) == (expected[1], *expected[3:]) and scales is expected[2]
        if not is_alike or not min(1, vectors.channels) <= channels <= vectors.channels:
            raise DamagedGraphError(
                f"a cache of {format} and {channels} channels, expected {expected[1]} and {vectors.channels}"
            )
        layer, is_value = self._attention_layers[number // 2], number % 2

        def argument(values: list[Any], cache: KVCache) -> PagedVectors:
            attention = attention_cache(cache.layers[layer])
            assert attention is not None
            return attention[is_value]

        if channels == vectors.channels:
            return argument
        return lambda values, cache: replace(argument(values, cache), channels=channels)

    def _place_of(self, tensors: list[CacheTensor]) -> int:
        """Return the place of keys or values among the keys and values of all attention layers."""
        return self._stored.index([tensor.number for tensor in tensors])

    def _window_of(self, name: str, values: dict[str, Any]) -> int | None:
        """Return the window of the layer whose keys and values are arguments. None: no window, or no such arguments.

        Raises DamagedGraphError for attention to tokens before the window, which have no blocks.
        """
        sides = [values[side] for side in ("key_cache_tensors", "value_cache_tensors") if side in values]
        windows = {self._windows[self._place_of(tensors) // 2] for tensors in sides} or {None}
        if len(windows) > 1:
            raise DamagedGraphError(f"the keys and the values of {name} have different windows in export.json")
        (window,) = windows
        if name == "paged_attention" and window not in (None, values.get("window"), values.get("chunk")):
            raise DamagedGraphError(f"{name} has another window than its layer in export.json, {window} tokens")
        return window

    def _equal_sizes(self, name: str, values: dict[str, Any]) -> list[tuple[Argument, Argument]]:
        """Return pairs of sizes that must be equal.

        Raises DamagedGraphError if the producer of memory indices is not in INDEX_PRODUCERS.
        """
        is_windowed = self._window_of(name, values) is not None
        for (operator, argument), producers in (WINDOW_INDEX_PRODUCERS if is_windowed else INDEX_PRODUCERS).items():
            if operator == name and getattr(values[argument], "producer", None) not in producers:
                raise DamagedGraphError(f"{argument} of {name} are not computed by {' or '.join(sorted(producers))}")
        match name:
            case "paged_attention":
                rows = "token_ids" if values["query_starts"].producer == "query_starts" else "output_rows"
                return [(_size(values["query"], 0), self._num_rows(rows))]
            case "short_conv" | "gated_delta" | "ssd":
                rows = values[{"short_conv": "projected", "gated_delta": "qkv", "ssd": "xbc"}[name]]
                return [(_size(rows, 0), self._num_rows("token_ids"))]
            case "group_rows":
                return [(_constant(values["num_experts"]), self._sizes[values["chosen"].number])]
            case "grouped_matmul":
                return [(_size(values["x_codes"], 0), self._sizes[values["starts"].number])]
            case "combine_rows":
                return [(_size(values["parts"], 0), self._sizes[values["places"].number])]
            case "lora_add":
                num_rows, widths = _size(values["x"], 0), self._adapted[values["table_a"].layer].shape
                row_counts = [(_size(values[name], 0), num_rows) for name in ("y", "slots")]
                return row_counts + [
                    (_size(values[name], 1), _constant(width)) for name, width in zip("yx", widths, strict=True)
                ]
        return []

    def _num_rows(self, field: str) -> Argument:
        """Return the number of rows of a field of the batch."""
        return _size(Value(self._fields.index(field), field), 0)


def _with_starts(layer_vectors: Sequence[PagedVectors]) -> list[tuple[int, PagedVectors]]:
    """Return the keys or values of each layer with the index of their first tensor."""
    counts = [0, *accumulate(len(vectors.tensors) for vectors in layer_vectors)]
    return [*zip(counts, layer_vectors, strict=False)]


def _plain_value(kind: str, value: Any) -> Any:
    if kind == "as_float" and value in ("Infinity", "-Infinity", "NaN"):  # JSON has no such numbers
        return float(value)
    if not isinstance(value, PLAIN_TYPES[kind]) or (kind != "as_bool" and isinstance(value, bool)):
        raise DamagedGraphError(f"{value!r} is not of type {kind.removeprefix('as_')}")
    return value


def _is_computed(value: Any) -> bool:
    return any(map(_is_computed, value)) if isinstance(value, list) else isinstance(value, Value)


def _is_token_ids(value: Any) -> bool:
    return getattr(value, "producer", "") == "token_ids"


def _constant(value: Any) -> Argument:
    return lambda values, cache: value


def _resolved(value: Any) -> Argument:
    """Return the argument for a value or a list of values."""
    if isinstance(value, Value):
        number = value.number
        return lambda values, cache: values[number]
    if any(
        isinstance(item, CacheTensor | StateTensor | TablePart)
        for item in (value if isinstance(value, list) else [value])
    ):
        raise DamagedGraphError("the cache or adapters are arguments of a function that does not take them")
    if isinstance(value, list) and _is_computed(value):
        resolved = [_resolved(part) for part in value]
        return lambda values, cache: [part(values, cache) for part in resolved]
    return _constant(value)


def _state_argument(layer: int, number: int) -> Argument:
    return lambda values, cache: layer_states(cache.layers[layer])[number]


def _compound(parts: Parts, components: list[Argument]) -> Argument:
    return lambda values, cache: parts.unflatten([component(values, cache) for component in components])


def _num_integer_weights(name: str, values: Mapping[str, Any]) -> int:
    """Return the number of integer weights that share a product's float rows. 0: the operator is not such a product."""
    if name not in PRODUCTS or values["x_scales"] is not None:
        return 0
    codes = values[f"{PRODUCTS[name]}_codes"]
    if (codes[0] if isinstance(codes, list) else codes) not in (CODES["int8"], CODES["int4"]):
        return 0
    return len(values["weights_memories"]) if name == "grouped_matmul" else 1


def _quantized_input(quantize_rows: Callable[[Tensor, int], Activations], x: Argument, num_weights: int) -> Argument:
    return lambda values, cache: quantize_rows(x(values, cache), num_weights)


def _size(value: Any, axis: int) -> Argument:
    argument = _resolved(value)
    return lambda values, cache: argument(values, cache).shape[axis]


def _output_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the output rows [R, *] of x [T, *].

    If all rows are output rows, returns x itself, which has the same order.
    """
    return x if x.shape[0] == rows.shape[0] else x[rows]


def _lora_add(y: Tensor, x: Tensor, table: AdapterTable | None, slots: Tensor) -> None:
    if table is not None:
        lora_add(y, x, table, slots)


def _check_weights(argument: Any) -> None:
    """Raise ValueError if a kernel would read past the end of a packed weight."""
    weights = list(argument.weights) if isinstance(argument, WeightGroup) else argument
    for weight in weights if isinstance(weights, list) else [weights]:
        if isinstance(weight, FloatWeight):
            weight.check()


def _collectives_of(group: Group) -> dict[str, Callable[..., Any]]:
    """Return the collective operations of a rank in its group, by the targets of their nodes."""
    return {f"torch.ops.quintet.{name}.default": function for name, function in nodes.node_functions(group).items()}
