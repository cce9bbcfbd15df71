"""Write a checkpoint of any layout as one GGUF file, for llama.cpp and models/formats/gguf/reader.py.

Keys and tensor types are the same as in llama.cpp's converter. Memory holds one tensor at a time.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_VERSION
from numpy.typing import NDArray

from conf.errors import UserError
from models.formats.base import Checkpoint
from models.formats.gguf.changes import converter_change
from models.formats.gguf.config import END_TOKENS
from models.formats.gguf.config_writer import add_config, architecture_of
from models.formats.gguf.decoder_keys import rotary_factors
from models.formats.gguf.file_types import FILE_TYPES, tensor_types
from models.formats.gguf.imatrix import ImportanceMatrix
from models.formats.gguf.layouts import layout_of
from models.formats.gguf.output_tensor import OutputTensor, add_importance
from models.formats.gguf.special_tokens import NONE, SPACES_BEHIND_SPECIAL
from models.formats.gguf.vocabulary import gguf_vocabulary
from models.meta_model import open_model
from models.registry import find_architecture
from models.weights import match_tensors

log = logging.getLogger(__name__)


def write_gguf(
    checkpoint: Checkpoint,
    file: Path,
    dtype: str,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    imatrix: ImportanceMatrix | None = None,
) -> None:
    """Write the model and its tokenizer to `file`. The file gets its name only when it is complete.

    `dtype`: one of FILE_TYPES. Each tensor has the type and the bytes that llama-quantize gives it, with `imatrix` if
    given. A warning counts tensors whose row length the type's block size does not divide. Calls `on_bytes(done,
    total)` after every tensor. Raises UserError for a dtype, family, rotary scaling or tokenizer that GGUF does not
    support, for an importance matrix of another model, and as load_weights does.
    """
    if dtype not in FILE_TYPES:
        raise UserError(f"dtype={dtype!r} is not supported in GGUF: only {', '.join(FILE_TYPES)}")
    model_type = checkpoint.config.require("model_type", str)
    family = find_architecture(checkpoint.config)
    shape = family.read_config(checkpoint.config)
    architecture = architecture_of(model_type, shape)
    model, files = open_model(family, shape, checkpoint)
    names = match_tensors(model, files, family.ignored_tensors)
    sources = {names[name]: (opened, name) for opened in files for name in opened.shapes if name in names}
    tensors: dict[str, OutputTensor] = {}
    layout = layout_of(model_type, shape)
    for name, parameter in model.named_parameters():
        for part, target in enumerate(layout.llama_cpp_names(name)):
            if target not in tensors:
                change = converter_change(name, architecture, layout, shape, part)
                tensors[target] = OutputTensor(target, tuple(parameter.shape), change)
            tensors[target].sources.append(sources[name])
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    types = tensor_types(dtype, shapes, architecture, imatrix is not None)
    for name, tensor in tensors.items():
        tensor.type = types[name]
    add_importance(tensors, imatrix)
    unfinished = file.with_name(f"{file.name}.partial")
    writer = GGUFWriter(unfinished, architecture)
    try:
        writer.add_file_type(FILE_TYPES[dtype][1])
        writer.add_quantization_version(GGML_QUANT_VERSION)
        add_config(writer, model_type, shape)
        _add_origin(writer, imatrix)
        _add_tokenizer(writer, checkpoint, shape.vocab_size)
        _write_tensors(writer, list(tensors.values()), rotary_factors(shape), on_bytes)
        writer.close()
        os.replace(unfinished, file)
    finally:
        writer.close()
        unfinished.unlink(missing_ok=True)


def _add_origin(writer: GGUFWriter, imatrix: ImportanceMatrix | None) -> None:
    """Add the keys with which llama-quantize names the importance matrix, if any."""
    if imatrix is None:
        return
    writer.add_string("quantize.imatrix.file", str(imatrix.path))
    for dataset in imatrix.datasets[:1]:
        writer.add_string("quantize.imatrix.dataset", dataset)
    writer.add_uint32("quantize.imatrix.entries_count", len(imatrix.entries))
    writer.add_uint32("quantize.imatrix.chunks_count", imatrix.num_chunks)


def _write_tensors(
    writer: GGUFWriter,
    tensors: list[OutputTensor],
    factors: dict[str, NDArray[np.float32]],
    on_bytes: Callable[[int, int], None],
) -> None:
    for name, values in factors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in factors.values():
        writer.write_tensor_data(values)
    done, total = 0, sum(tensor.num_bytes for tensor in tensors)
    for tensor in tensors:
        writer.write_tensor_data(tensor.read())
        done += tensor.num_bytes
        on_bytes(done, total)


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
    file_ids = checkpoint.generation_config.get("eos_token_id") or checkpoint.config.raw("eos_token_id")
    ends = file_ids if isinstance(file_ids, list) else [file_ids]
    ordered = dict.fromkeys(id for id in (tokenizer.eos_token_id, *ends, *tokenizer.turn_end_ids) if id is not None)
    for name, id in zip(END_TOKENS, ordered or [NONE], strict=False):
        getattr(writer, f"add_{name}_token_id")(id)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)
