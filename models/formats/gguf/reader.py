"""Read GGUF, the one-file layout of llama.cpp, whole or split, in Hugging Face's terms: the keys of config.json, and weights with its
names, shapes and order of rows, dequantised while they are read.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader
from models.formats.base import CODE_GROUP, Checkpoint, WeightFile
from models.formats.gguf.header import GGUFHeader, TensorInfo, read_gguf_headers
from models.formats.gguf.names import ARCHITECTURE, ROTARY_FACTORS, expert_names, hugging_face_name
from models.formats.gguf.tokenizer import load_gguf_tokenizer
from models.formats.rotary_rows import half_apart
from models.layers.rotary import RotaryConfig, llama3_factors

STORED = {  # types that are read as they are
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# Symmetric codes with a scale for each CODE_GROUP, which quantised layers take as they are.
CODE_BITS = {GGMLQuantizationType.Q8_0: 8, GGMLQuantizationType.Q4_0: 4}
SCALE_BYTES = 2  # float16, before a group's codes
END_TOKENS = ("eos", "eot", "eom")  # of the text, of a turn, of a message
NO_EFFECT = ("rope.scaling.finetuned", "tensor_data_layout")  # provenance
DEQUANTISED_AT_ONCE = 2**20  # values, so that the library's intermediate results stay small beside a tensor
LLAMA3_ORIGINAL_LENGTHS = [2**i for i in range(4, 25)]  # tried until one gives the file's factors


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF model. Raises UserError for damaged or missing files, and for features of llama.cpp that no family here has."""
    headers = read_gguf_headers(path)
    config = read_gguf_config(headers)
    return Checkpoint(
        headers[0].path,
        config,
        {},
        lambda expected: open_gguf_weights(headers, config),
        partial(load_gguf_tokenizer, headers[0]),
    )


def read_gguf_config(headers: list[GGUFHeader]) -> ConfigReader:
    """Return the metadata as keys of config.json. Vocabulary, head, biases and dtype are taken from the tensors."""
    path = headers[0].path
    architecture = headers[0].section("general").expect("architecture", tuple(sorted(set(ARCHITECTURE.values()))), None)
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    if not tensors:
        raise UserError(
            f"{path} holds a vocabulary and no tensors: it can be a tokenizer (model.tokenizer=FILE), but no model"
        )
    if listed := next((key for key in headers[0].arrays if key.startswith(f"{architecture}.")), None):
        raise UserError(
            f"{path}: {listed[:80]!r} has a value for each layer, which is not supported: expected one number"
        )
    read = headers[0].section(architecture)
    most_experts = max(tensor.shape[0] if len(tensor.shape) == 3 else len(tensors) for tensor in tensors.values())
    # Checked here, because building a model of so many modules would take all memory before any is found missing.
    for key, most in (("block_count", len(tensors)), ("expert_count", most_experts)):
        if (number := read.get(key, int, 0)) > most:
            raise UserError(f"{path}: {architecture}.{key}={number} is more than its {len(tensors)} tensors can be")
    heads, hidden_size = read.count("attention.head_count"), read.count("embedding_length")
    head_dim = read.count("attention.key_length", max(hidden_size // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        read.expect(key, (head_dim,), head_dim)
    read.expect("attention.causal", (True,), True)
    for key in NO_EFFECT:
        read.raw(key)
    embedding = tensors.get("token_embd.weight")
    values: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": read.count("feed_forward_length"),
        "num_hidden_layers": read.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": read.positive("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read.count("context_length"),
        "vocab_size": read.count("vocab_size", embedding.shape[0] if embedding else None),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": read.positive("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(read, headers, head_dim),
        "torch_dtype": _dtype(list(tensors.values())),
    }
    values |= _family(read, architecture, tensors) | _special_tokens(headers[0].section("tokenizer.ggml"))
    return ConfigReader(values | {f"{architecture}.{key}": read.raw(key) for key in read.unread()}, str(path))


def _family(read: ConfigReader, architecture: str, tensors: dict[str, TensorInfo]) -> dict[str, Any]:
    """Return model_type and the family's keys. llama.cpp's `llama` with experts is Mixtral, with a window Mistral."""
    if architecture == "qwen2":
        return {"model_type": "qwen2"}
    window = None if read.raw("attention.sliding_window") is None else read.count("attention.sliding_window")
    if read.get("expert_count", int, 0):
        experts = {
            "num_local_experts": read.count("expert_count"),
            "num_experts_per_tok": read.count("expert_used_count"),
        }
        return {"model_type": "mixtral", "sliding_window": window} | experts
    if window is not None:
        return {"model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    return {"model_type": "llama"} | biases


def _special_tokens(read: ConfigReader) -> dict[str, Any]:
    ends = (read.raw(f"{name}_token_id") for name in END_TOKENS)
    return {"bos_token_id": read.raw("bos_token_id"), "eos_token_id": [id for id in ends if id is not None] or None}


def _dtype(tensors: list[TensorInfo]) -> str:
    """Return the dtype in which most bytes are stored; float16 where those are quantised.

    A dequantised value is a float16 scale times a small integer. float16 rounds it by 2^-12, bfloat16 by 2^-9, half a step of Q8_0.
    """
    stored = [tensor.type if tensor.type in STORED else None for tensor in tensors]
    num_bytes = {kind: sum(t.num_bytes for t, of in zip(tensors, stored, strict=True) if of is kind) for kind in stored}
    kind = max(num_bytes, key=num_bytes.__getitem__)
    return str(torch.float16 if kind is None else STORED[kind]).removeprefix("torch.")


def _rope_scaling(read: ConfigReader, headers: list[GGUFHeader], head_dim: int) -> dict[str, Any] | None:
    kind = read.expect("rope.scaling.type", ("none", "linear", "yarn"), "none")
    for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        read.expect(f"rope.scaling.{key}", (None, 1.0), None)
    factors = next(
        ((header, header.tensors[ROTARY_FACTORS]) for header in headers if ROTARY_FACTORS in header.tensors), None
    )
    if factors:
        read.expect("rope.scaling.type", ("none",), "none")
        return _llama3_scaling(*factors, read.positive("rope.freq_base", 10000.0), head_dim)
    if kind == "none":
        read.expect("rope.scaling.factor", (None, 0.0, 1.0), None)
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": read.positive("rope.scaling.factor")}
    names = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    return scaling | {
        ours: read.raw(key) for ours, key in names.items() if kind == "yarn" and read.raw(key) is not None
    }


def _llama3_scaling(header: GGUFHeader, tensor: TensorInfo, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Find the parameters of Llama 3.1's scaling that give the file's factors, [D / 2] divisors of the frequencies.

    Raises UserError where none do.
    """
    if tensor.shape != (head_dim // 2,):
        raise UserError(
            f"{header.path}: {ROTARY_FACTORS} has the shape {list(tensor.shape)}, expected {[head_dim // 2]}"
        )
    factors = _read_tensor(header.path, tensor).float()
    factor = float(str(np.float32(factors.max().item())))
    if bool((factors == 1).all()):
        return None
    for original in LLAMA3_ORIGINAL_LENGTHS:
        # Scaling the other three parameters by one number changes nothing, so trying lengths is enough.
        tried = RotaryConfig(head_dim, original, theta, "llama3", factor, original)
        # Not equal to the bit: the file's factors are float32 differences of near numbers.
        if torch.allclose(factors, llama3_factors(tried), rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": tried.low_freq_factor,
                "high_freq_factor": tried.high_freq_factor,
                "original_max_position_embeddings": original,
            }
    raise UserError(
        f"{header.path}: {ROTARY_FACTORS} holds factors that are not those of Llama 3's scaling, which is not supported"
    )


def open_gguf_weights(headers: list[GGUFHeader], config: ConfigReader) -> list[WeightFile]:
    """Open the weights. config: from read_gguf_config. Raises UserError where two tensors have the same Hugging Face name."""
    turned = ARCHITECTURE[config.require("model_type", str)] == "llama"
    heads = {"q_proj": config.count("num_attention_heads"), "k_proj": config.count("num_key_value_heads")}
    return [GGUFWeights(header, heads if turned else {}) for header in headers]


class GGUFWeights:
    """The tensors of one file under Hugging Face's names, as CodedWeights. One is in memory at a time.

    They are read, not mapped: when a mapped file becomes shorter, the process ends.
    """

    is_mapped = False

    def __init__(self, header: GGUFHeader, heads: dict[str, int]) -> None:
        """heads: the number of heads of each projection whose rows llama.cpp reordered."""
        self.path = header.path
        self._heads = heads
        self._sources: dict[str, TensorInfo] = {}
        for name, tensor in header.tensors.items():
            if name == ROTARY_FACTORS:
                continue
            for ours, source in _hugging_face_tensors(name, tensor).items():
                if ours in self._sources:
                    raise UserError(f"{self.path} holds {ours} twice: the second is in {name!r}")
                self._sources[ours] = source
        self.shapes = {name: source.shape for name, source in self._sources.items()}
        self.dtypes = {name: STORED.get(source.type, torch.float32) for name, source in self._sources.items()}

    def coded_modules(self) -> dict[str, int]:
        return {
            name.removesuffix(".weight"): CODE_BITS[source.type]
            for name, source in self._sources.items()
            if source.type in CODE_BITS and len(source.shape) == 2
        }

    def keep_codes(self, modules: Iterable[str]) -> None:
        for module in modules:
            if source := self._sources.pop(f"{module}.weight", None):
                self._sources |= {f"{module}.{part}": source for part in ("codes", "scales")}
        self.shapes = {name: _shape(name, source) for name, source in self._sources.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            source = self._sources[name]
            if name.endswith((".codes", ".scales")):
                tensor = _read_codes(self.path, source)[name.endswith(".scales")]
            else:
                tensor = _read_tensor(self.path, source)
            heads = self._heads.get(name.split(".")[-2]) if "_proj." in name else None
            if heads is None:
                yield name, tensor
                continue
            if tensor.shape[0] % (2 * heads):
                raise UserError(
                    f"{self.path}: {name} has {tensor.shape[0]} rows, which are not {heads} heads of an even size"
                )
            yield name, half_apart(tensor, heads)


def _hugging_face_tensors(name: str, tensor: TensorInfo) -> dict[str, TensorInfo]:
    """Return the tensors that Hugging Face's layout has for this one: itself, or one for each expert that it holds."""
    experts = expert_names(name, tensor.shape[0]) if len(tensor.shape) == 3 else None
    if experts is None:
        return {hugging_face_name(name): tensor}
    size = tensor.num_bytes // len(experts)
    return {
        ours: TensorInfo(tensor.shape[1:], tensor.type, tensor.offset + i * size, size)
        for i, ours in enumerate(experts)
    }


def _shape(name: str, source: TensorInfo) -> tuple[int, ...]:
    return (source.shape[0], source.shape[1] // CODE_GROUP) if name.endswith(".scales") else source.shape


def _read_codes(path: Path, tensor: TensorInfo) -> tuple[Tensor, Tensor]:
    """Read the codes int8 [O, I] and scales float16 [O, I / 32] of a tensor whose type has CODE_BITS, into new memory.

    A group is a scale and its codes. Q8_0 has int8 codes. Q4_0 has codes + 8 in 16 bytes, whose lower four bits are the group's first half.
    """
    groups = torch.from_numpy(_read_bytes(path, tensor)).view(tensor.shape[0], tensor.shape[1] // CODE_GROUP, -1)
    scales = groups[:, :, :SCALE_BYTES].contiguous().view(torch.float16).flatten(1)
    codes = groups[:, :, SCALE_BYTES:]
    if CODE_BITS[tensor.type] == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=2) - 8  # uint8, which wraps as int8 does
    return codes.contiguous().view(torch.int8).flatten(1), scales


def _read_bytes(path: Path, tensor: TensorInfo) -> NDArray[np.uint8]:
    data = np.fromfile(path, np.uint8, tensor.num_bytes, offset=tensor.offset)
    if len(data) != tensor.num_bytes:
        raise UserError(
            f"{path} has {len(data)} bytes of a tensor at {tensor.offset}, expected {tensor.num_bytes}: it was changed"
        )
    return data


def _read_tensor(path: Path, tensor: TensorInfo) -> Tensor:
    """Read a tensor in its own dtype, or dequantised to float32, into new memory."""
    data = _read_bytes(path, tensor)
    if tensor.type in STORED:
        return torch.from_numpy(data).view(STORED[tensor.type]).view(tensor.shape)
    rows = data.reshape(math.prod(tensor.shape[:-1]), -1)
    values = np.empty((len(rows), tensor.shape[-1]), np.float32)
    at_once = max(1, DEQUANTISED_AT_ONCE // tensor.shape[-1])
    with np.errstate(all="ignore"):  # a damaged scale gives NaN, which is reported where the weights are loaded
        for start in range(0, len(rows), at_once):
            values[start : start + at_once] = dequantize(rows[start : start + at_once], tensor.type)
    return torch.from_numpy(values).view(tensor.shape)
