"""Write a checkpoint of any layout as one GGUF file, which llama.cpp and models/formats/gguf/reader.py read.

Keys and the types of tensors are those of llama.cpp's own converter. One tensor is in memory at a time.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType, LlamaFileType, RopeScalingType
from gguf.quants import quantize
from numpy.typing import NDArray
from torch import Tensor

from conf.errors import UserError
from models.decoder import DecoderConfig
from models.families.mixtral import MixtralConfig
from models.families.qwen2 import Qwen2Config
from models.formats.base import Checkpoint, WeightFile
from models.formats.gguf.config import END_TOKENS
from models.formats.gguf.names import LAYOUTS, ROTARY_FACTORS
from models.formats.gguf.special_tokens import NONE, SPACES_BEHIND_SPECIAL
from models.formats.gguf.vocabulary import gguf_vocabulary
from models.formats.rotary_rows import side_by_side
from models.layers.rotary import RotaryConfig, llama3_factors, yarn_mscale
from models.outline import open_model
from models.registry import find_architecture
from models.weights import match_tensors

log = logging.getLogger(__name__)

ARCHITECTURE = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2"}  # by model_type
TYPES = {  # by dtype: the type of matrices, and of a file that mostly holds these
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "float16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
ROUTER = "ffn_gate_inp.weight"  # float32 always: it is small, and its choice changes all that follows


def write_gguf(
    checkpoint: Checkpoint, file: Path, dtype: str, on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the model and its tokenizer to `file`, which appears complete or not at all. dtype: float32, float16, bfloat16 or q8_0.

    Norms, biases and routers are float32. With q8_0, matrices whose rows are not a multiple of 32 are float16.
    `on_bytes(done, total)` is called after every tensor.
    Raises UserError for a dtype, a family, a rotary scaling or a tokenizer that the file cannot hold, and as load_weights does.
    """
    if dtype not in TYPES:
        raise UserError(f"dtype={dtype!r} is not supported in GGUF: only {', '.join(TYPES)}")
    model_type = checkpoint.config.require("model_type", str)
    if model_type not in ARCHITECTURE:
        raise UserError(f"model_type={model_type!r} cannot be written as GGUF: only {', '.join(sorted(ARCHITECTURE))}")
    architecture = find_architecture(checkpoint.config)
    shape: DecoderConfig = architecture.read_config(checkpoint.config)
    model, files = open_model(architecture, shape, checkpoint)
    names = match_tensors(model, files, architecture.ignored_tensors)
    sources = {names[name]: (opened, name) for opened in files for name in opened.shapes if name in names}
    tensors: dict[str, _StoredTensor] = {}
    for name, parameter in model.named_parameters():
        target = LAYOUTS[model_type].llama_cpp_name(name)
        if target not in tensors:
            tensors[target] = _StoredTensor(
                target, dtype, tuple(parameter.shape), _turned_heads(name, model_type, shape)
            )
        tensors[target].sources.append(sources[name])
    if other := [
        name for name, tensor in tensors.items() if tensor.type is GGMLQuantizationType.F16 and dtype != "float16"
    ]:
        log.warning(
            "%d tensors are float16 instead of %s: rows of no multiple of 32 (%s first)", len(other), dtype, other[0]
        )
    partial = file.with_name(f"{file.name}.partial")
    writer = GGUFWriter(partial, ARCHITECTURE[model_type])
    try:
        writer.add_file_type(TYPES[dtype][1])
        writer.add_quantization_version(GGML_QUANT_VERSION)
        _add_shape(writer, shape)
        _add_tokenizer(writer, checkpoint, shape.vocab_size)
        _write_tensors(writer, list(tensors.values()), shape.rotary, on_bytes)
        writer.close()
        os.replace(partial, file)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


class _StoredTensor:
    """A tensor of the file: one parameter, or the same matrix of every expert of a layer."""

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], heads: int | None) -> None:
        self.name = name
        self.heads = heads
        self.sources: list[tuple[WeightFile, str]] = []
        self._source_shape = shape
        self.type = TYPES[dtype][0]
        if len(shape) == 1 or name.endswith(ROUTER):
            self.type = GGMLQuantizationType.F32
        elif shape[-1] % GGML_QUANT_SIZES[self.type][0]:
            self.type = GGMLQuantizationType.F16

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.sources), *self._source_shape) if "_exps." in self.name else self._source_shape

    @property
    def num_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape, dtype=np.int64)) // block * block_bytes

    def read(self) -> NDArray[np.uint8]:
        """Return the tensor's bytes as the file holds them."""
        stored = np.empty((len(self.sources), self.num_bytes // len(self.sources)), np.uint8)
        for row, (file, name) in zip(stored, self.sources, strict=True):
            tensor = next(iter(file.read([name])))[1]
            row[:] = self._bytes(tensor if self.heads is None else side_by_side(tensor, self.heads))
        return stored.reshape(-1)

    def _bytes(self, tensor: Tensor) -> NDArray[np.uint8]:
        if self.type is GGMLQuantizationType.Q8_0:
            return quantize(tensor.float().numpy(), self.type).reshape(-1)
        dtype = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}.get(
            self.type, torch.float32
        )
        if dtype is torch.float16 and tensor.abs().amax() > torch.finfo(dtype).max:
            raise UserError(
                f"{self.name} holds {tensor.abs().amax():.6g}, more than float16 can: give bfloat16, float32 or q8_0"
            )
        return tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy()


def _turned_heads(name: str, model_type: str, shape: DecoderConfig) -> int | None:
    """Return the number of heads whose rotary rows llama.cpp wants side by side; None for tensors whose rows stay in order."""
    if ARCHITECTURE[model_type] != "llama":
        return None
    return {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}.get(name.split(".")[-2])


def _write_tensors(
    writer: GGUFWriter, tensors: list[_StoredTensor], rotary: RotaryConfig, on_bytes: Callable[[int, int], None]
) -> None:
    factors = llama3_factors(rotary).numpy() if rotary.type == "llama3" else None
    if factors is not None:
        writer.add_tensor_info(ROTARY_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    done, total = 0, sum(tensor.num_bytes for tensor in tensors)
    for tensor in tensors:
        writer.write_tensor_data(tensor.read())
        done += tensor.num_bytes
        on_bytes(done, total)


def _add_shape(writer: GGUFWriter, shape: DecoderConfig) -> None:
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.rotary.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    if isinstance(shape, Qwen2Config) and any(shape.windows):
        raise UserError("a Qwen2 with sliding windows cannot be written as GGUF: llama.cpp knows none in it")
    if window := getattr(shape, "sliding_window", None):
        writer.add_sliding_window(window)
    if isinstance(shape, MixtralConfig):
        writer.add_expert_count(shape.mixture.num_experts)
        writer.add_expert_used_count(shape.mixture.num_experts_per_tok)
    _add_rotary(writer, shape.rotary)


def _add_rotary(writer: GGUFWriter, rotary: RotaryConfig) -> None:
    writer.add_rope_dimension_count(rotary.head_dim)
    writer.add_rope_freq_base(rotary.theta)
    own_attention = rotary.type == "yarn" and rotary.attention_factor != yarn_mscale(rotary.factor, 1.0)
    if rotary.type == "dynamic" or own_attention or not rotary.truncate:
        raise UserError(
            f"rope_scaling of type {rotary.type!r} with these fields cannot be written as GGUF: llama.cpp has none like it"
        )
    if rotary.type in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rotary.type))
        writer.add_rope_scaling_factor(rotary.factor)
    if rotary.type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary.original_length)
        writer.add_rope_scaling_yarn_beta_fast(rotary.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rotary.beta_slow)


def _add_tokenizer(writer: GGUFWriter, checkpoint: Checkpoint, vocab_size: int) -> None:
    tokenizer = checkpoint.load_tokenizer()
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    vocabulary = gguf_vocabulary(tokenizer, vocab_size)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_merges(vocabulary.merges)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_space_prefix(vocabulary.adds_space_prefix)
    writer.add_remove_extra_whitespaces(vocabulary.removes_extra_whitespaces)
    if not vocabulary.spaces_behind_special:
        writer.add_bool(SPACES_BEHIND_SPECIAL, False)
    if vocabulary.unknown_token_id is not None:
        writer.add_unk_token_id(vocabulary.unknown_token_id)
    writer.add_bos_token_id(NONE if tokenizer.bos_token_id is None else tokenizer.bos_token_id)
    given = checkpoint.generation_config.get("eos_token_id") or checkpoint.config.raw("eos_token_id")
    ends = given if isinstance(given, list) else [given]
    ordered = dict.fromkeys(id for id in (tokenizer.eos_token_id, *ends, *tokenizer.turn_end_ids) if id is not None)
    for name, id in zip(END_TOKENS, ordered or [NONE], strict=False):
        getattr(writer, f"add_{name}_token_id")(id)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)
