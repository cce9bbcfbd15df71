"""The formats in which `task=convert` writes a model."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from conf.tasks import CheckpointFormat, ConvertConfig, ConvertDType
from models.formats.gguf.imatrix import read_imatrix
from models.formats.gguf.writer import write_gguf
from models.formats.huggingface_writer import write_companions, write_huggingface
from models.formats.sentence_transformers import MODULES
from models.formats.sharded_writer import divide_tensors, write_sharded
from models.weights import DTYPES, stored_dtype
from pipelines.tasks.conversion import Conversion
from quantization.smoothing_record import FOLDS

log = logging.getLogger(__name__)

GGUF_FILE = "model.gguf"

Write: TypeAlias = Callable[[Path, Callable[[int, int], None]], dict[str, str]]
"""Writes a model into a folder.

Calls back with the bytes done and the total; returns the sha256 of the files that it hashed.
"""


def writer_of(config: ConvertConfig, conversion: Conversion) -> Write:
    """Return the writer of `convert.format`. Raises UserError if the model cannot be sharded as requested."""
    checkpoint, files, dtype = conversion.checkpoint, conversion.files, conversion.dtype
    if config.format is CheckpointFormat.sharded:
        names = {name: conversion.matched.get(name) for file in files for name in file.shapes}
        shares = divide_tensors(
            conversion.model, names, config.tp, config.pp, dtype or DTYPES[stored_dtype(checkpoint.config, files)]
        )

    def write(folder: Path, on_bytes: Callable[[int, int], None]) -> dict[str, str]:
        if config.format is CheckpointFormat.gguf:
            if (checkpoint.path / MODULES).is_file():
                log.warning("GGUF has no place for %s: give embed.pooling and embed.normalize with this file", MODULES)
            stored = (
                config.dtype.name if config.dtype is not ConvertDType.auto else stored_dtype(checkpoint.config, files)
            )
            imatrix = None if config.imatrix is None else read_imatrix(Path(config.imatrix).expanduser())
            write_gguf(checkpoint, folder / GGUF_FILE, stored, on_bytes, imatrix)
            return {}
        write_companions(checkpoint, folder, dtype)
        if (checkpoint.path / FOLDS).is_file():  # adapters need this file
            shutil.copyfile(checkpoint.path / FOLDS, folder / FOLDS)
        if config.format is CheckpointFormat.hf:
            return write_huggingface(files, folder, config.max_shard_bytes, on_bytes)
        return write_sharded(files, folder, shares, on_bytes)

    return write
