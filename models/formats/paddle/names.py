"""Map PaddleNLP's weight names and orders to Hugging Face's.

Source: paddlenlp/transformers/*/modeling.py (`_get_name_mappings`, `_get_tensor_parallel_mappings`,
`_get_fuse_or_split_param_mappings`).

Every linear weight is stored as [inputs, outputs]. A tensor-parallel rank stores its rows of each part of a fused
matrix, so each part is joined separately.

H query heads, G key/value heads, D channels per head.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

EMBEDDINGS = ("embed_tokens", "word_embeddings", "position_embeddings", "wte", "wpe")
HEADS = ("lm_head.decoder_weight", "lm_head.decoder.weight")  # [vocabulary, channels], as the embedding
HEAD = "lm_head.weight"
TYPES = {"chatglm_v2": "chatglm", "ernie": "ernie3_5", "gpt": "gpt2"}
"""The architecture's `model_type` by PaddleNLP's, where they differ."""
PREFIXES = {
    "bloom": ("bloom.", "transformer."),
    "chatglm_v2": ("chatglm_v2.", "transformer."),
    "qwen": ("qwen.", "transformer."),
    **{
        name: (f"{name}.", "model.")
        for name in ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
    },
    "ernie": ("ernie.", "model."),
    "gpt": ("gpt.", "transformer."),
}
"""By PaddleNLP's `model_type`: the prefix of tensor names in PaddleNLP's and in Hugging Face's layout."""
GPT_MODULES = {
    "embeddings.word_embeddings": "wte",
    "embeddings.position_embeddings": "wpe",
    "decoder.norm": "ln_f",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.qkv_proj": "attn.qkv_proj",
    "self_attn.out_proj": "attn.c_proj",
    "linear1": "mlp.c_fc",
    "linear2": "mlp.c_proj",
}
ERNIE_MODULES = {
    ".self_attn_mlp.qkv_gate_up_proj.": ".qkv_gate_up_proj.",
    ".self_attn_mlp.o_proj.weight": ".o_down_proj.weight",
    ".self_attn_mlp.o_proj.bias": ".mlp.down_proj.bias",
}
GPT_LAYER_NAME = re.compile(r"decoder\.layers\.([0-9]+)\.(.+)")


@dataclass(frozen=True)
class Fused:
    """A matrix with the outputs of several modules."""

    parts: dict[str, int]
    """Names of the modules, and the ratio of their row counts."""
    unit: int | None = None
    """Rows per unit of this ratio, if the parts alternate (for example for each key/value head). None: each part is
    contiguous.
    """
    axis: int = 0
    """1: the modules read different inputs, and their outputs are added."""


@dataclass(frozen=True)
class RowSlice:
    """Some rows of a matrix.

    Each of `groups` groups has `units` equal units; the slice has the units `start` to `stop` of each group.
    """

    groups: int
    units: int
    start: int
    stop: int

    def of(self, size: int) -> int:
        """Return the slice's number of rows in a matrix of `size` rows."""
        return size // self.units * (self.stop - self.start)


@dataclass(frozen=True)
class TensorPart:
    """A module's part of a stored tensor."""

    name: str
    slices: tuple[RowSlice, ...] = ()
    """Applied in order, each to the result of the previous one, because fused matrices can be nested. Empty: the whole
    tensor.
    """
    axis: int = 0
    """Axis of the slices: 0 outputs, 1 inputs."""


@dataclass(frozen=True)
class Names:
    """The weight names of one family, and the orders of its fused matrices."""

    model_type: str
    """PaddleNLP's `model_type`."""
    is_tied: bool
    """Whether a stored head is [vocabulary, channels], as the embedding."""
    fused: Mapping[str, Fused] = field(default_factory=dict)
    """By the last component of a module's name in the files."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Matrices that the model fuses: the parts in the files, by the last component of the model's module name."""
    stays_transposed: bool = False
    """Whether the model's own checkpoints also hold linear weights as [inputs, outputs]."""

    def hf_name(self, source: str) -> str:
        """Return a tensor's name in Hugging Face's layout. Keeps an unknown name, which is rejected later."""
        if source in HEADS:
            return HEAD
        prefix, our_prefix = PREFIXES[self.model_type]
        name = source.removeprefix(prefix)
        if name == source:
            return source
        if self.model_type == "ernie":
            for paddle_module, module in ERNIE_MODULES.items():
                name = name.replace(paddle_module, module)
        return our_prefix + (_gpt_name(name) if self.model_type == "gpt" else name)

    def is_transposed(self, source: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor in the files is [inputs, outputs]."""
        return _is_linear(source, shape) and source not in HEADS and not (source == HEAD and self.is_tied)

    def keeps_transposed(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor in the model's own checkpoints is [inputs, outputs]."""
        return self.stays_transposed and _is_linear(name, shape) and name != HEAD

    def parts(self, source: str, shape: tuple[int, ...]) -> Iterator[TensorPart]:
        """Yield the modules' parts of a stored tensor. Raises ValueError if the shape does not fit the parts."""
        yield from self._divide(TensorPart(self.hf_name(source)), shape)

    def _divide(self, part: TensorPart, shape: tuple[int, ...]) -> Iterator[TensorPart]:
        prefix, leaf = _split(part.name)
        parent, module = _split(prefix)
        fused = self.fused.get(module)
        if fused is None:
            yield part
            return
        size = shape[fused.axis] if len(shape) > fused.axis else 0
        units = sum(fused.parts.values())
        groups = size // (fused.unit * units) if fused.unit else 1
        if not size or not groups or size % (groups * units):
            channels = "inputs" if fused.axis else "outputs"
            raise ValueError(
                f"{part.name} has {size} {channels}, which cannot be divided into {', '.join(fused.parts)}"
            )
        start = 0
        for name, count in fused.parts.items():
            row_slice = RowSlice(groups, units, start, start + count)
            divided = TensorPart(f"{parent}.{name}.{leaf}", (*part.slices, row_slice), fused.axis)
            yield from self._divide(divided, (row_slice.of(size), *shape[1:]))
            start += count

    def parts_of(self, name: str) -> dict[str, int]:
        """Return the parts of a model tensor by name, with their relative row counts."""
        prefix, leaf = _split(name)
        parent, module = _split(prefix)
        parts = self.joined.get(module)
        if parts is None:
            return {name: 1}
        counts = {key: count for fused in self.fused.values() for key, count in fused.parts.items()}
        return {f"{parent}.{part}.{leaf}": counts[part] for part in parts}


def names_of(model_type: str, is_tied: bool, heads: int, key_value_heads: int, head_dim: int, wide: int) -> Names:
    """Return the names of a family in `PREFIXES`. `wide`: feed-forward channels, for Ernie's fused matrices."""
    by_head = {"q_proj": heads // key_value_heads, "k_proj": 1, "v_proj": 1}
    if model_type == "chatglm_v2":  # [H D + G D + G D], and gate rows before up rows
        qkv = {"query": heads, "key": key_value_heads, "value": key_value_heads}
        fused = {"query_key_value": Fused(qkv), "dense_h_to_4h": Fused({"gate": 1, "up": 1})}
        return Names(model_type, is_tied, fused, {name: tuple(matrix.parts) for name, matrix in fused.items()})
    if model_type == "qwen":
        fused = {"c_attn": Fused({"query": 1, "key": 1, "value": 1})}
        return Names(model_type, is_tied, fused, {"c_attn": ("query", "key", "value")})
    if model_type == "gpt":  # rows are [H, 3, D]; GPT-2 has [3, H, D]
        fused = {"qkv_proj": Fused(by_head, head_dim)}
        return Names(model_type, is_tied, fused, {"c_attn": tuple(by_head)}, stays_transposed=True)
    if model_type == "bloom":
        return Names(model_type, is_tied)
    if model_type == "ernie":
        hidden = heads * head_dim
        unit = math.gcd(hidden, wide)
        rows = {"self_attn.qkv_proj": 3 * hidden // unit, "mlp.gate_proj": wide // unit, "mlp.up_proj": wide // unit}
        columns = {"mlp.down_proj": wide // unit, "self_attn.o_proj": hidden // unit}
        fused = {
            "qkv_gate_up_proj": Fused(rows),
            "o_down_proj": Fused(columns, axis=1),
            "qkv_proj": Fused(by_head, head_dim),
        }
        return Names(model_type, is_tied, fused)
    fused = {"qkv_proj": Fused(by_head, head_dim), "gate_up_fused_proj": Fused({"gate_proj": 1, "up_proj": 1})}
    return Names(model_type, is_tied, fused)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    module, leaf = _split(name)
    return len(shape) == 2 and leaf == "weight" and _split(module)[1] not in EMBEDDINGS


def _gpt_name(name: str) -> str:
    layer = GPT_LAYER_NAME.fullmatch(name)
    module, leaf = _split(layer[2] if layer else name)
    if module not in GPT_MODULES:
        return name
    return f"h.{layer[1]}.{GPT_MODULES[module]}.{leaf}" if layer else f"{GPT_MODULES[module]}.{leaf}"


def _split(name: str) -> tuple[str, str]:
    before, _, last = name.rpartition(".")
    return before, last
