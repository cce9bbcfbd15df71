"""Layouts of quantised checkpoints.

`quant_method` in the `quantization_config` of config.json selects the layout. In GGUF files the tensor types select it.
"""

from collections.abc import Callable

import torch

from conf.decoding import warn_once
from conf.errors import UserError
from models.config import ConfigReader
from models.formats.base import WeightFile
from quantization.layouts import autoround, awq, bitnet, compressed_tensors, fp8, gptq, modelopt
from quantization.layouts.base import StoredQuantization
from quantization.layouts.gguf import CPU, read_gguf_quantization, warn_of_unpacked
from quantization.layouts.sparsity import read_sparsity

READERS: dict[str, Callable[[ConfigReader], StoredQuantization]] = {
    compressed_tensors.METHOD: compressed_tensors.read_compressed_tensors,
    awq.METHOD: awq.read_awq,
    gptq.METHOD: gptq.read_gptq,
    autoround.METHOD: autoround.read_autoround,
    fp8.METHOD: fp8.read_fp8,
    bitnet.METHOD: bitnet.read_bitnet,
    modelopt.METHOD: modelopt.read_modelopt,
}


def read_quantization(
    config: ConfigReader, files: list[WeightFile], device: torch.device = CPU
) -> StoredQuantization | None:
    """Return the quantisation of a checkpoint; None for a float checkpoint.

    For GGUF `files` it names the modules that stay packed on `device`. Logs a warning if weights are pruned, because
    zeros are multiplied too. Raises UserError for methods and settings that are not implemented.
    """
    section = config.section("quantization_config")
    if section is None:
        packed = read_gguf_quantization(files, device)
        warn_of_unpacked(files, packed)
        return packed
    method = section.require("quant_method", str)
    if method not in READERS:
        raise UserError(f"quantization_config: quant_method={method!r} is not supported: only {', '.join(READERS)}")
    stored = READERS[method](section)
    if unread := section.unread():
        raise UserError(f"quantization_config has settings that are not known: {', '.join(unread)}")
    sparsity = read_sparsity(config)
    if sparsity is None:
        return stored
    warn_once(
        f"the checkpoint's weights are pruned ({sparsity.structure}): they run dense on {device.type}, which multiplies zeros, too"
    )
    return None if sparsity.is_alone else stored


def ignored_tensors(stored: StoredQuantization | None) -> tuple[str, ...]:
    """Return the ends of the names of tensors that are not read."""
    return modelopt.CACHE_SCALES if isinstance(stored, modelopt.ModelOpt) else ()
