"""The tensors that `task=convert` writes: the source's tensors, after an adapter is merged and the dtype is cast."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from conf.constraints import typed
from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import ModelConfig
from conf.tasks import CheckpointFormat, ConvertConfig, ConvertDType
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.formats.base import Checkpoint, WeightFile
from models.formats.lora import merge_lora
from models.formats.safetensors_writer import entries_of
from models.meta_model import open_model
from models.weights import DTYPES, CastFile, match_tensors
from pipelines.loading.model_source import ModelSource
from pipelines.loading.planning import plan_model


@dataclass(frozen=True)
class Conversion:
    """A source, and the tensors that are written. A tensor is computed when it is read."""

    checkpoint: Checkpoint
    """The source's checkpoint, except that its weights are `files`."""
    model: CausalLM
    """On the meta device."""
    files: list[WeightFile]
    matched: dict[str, str]
    """Tensor name in the source's files to parameter name."""
    dtype: torch.dtype | None
    """The dtype to which tensors are cast; None: they are not cast."""
    num_source_bytes: int


def open_conversion(options: ModelConfig, config: ConvertConfig, source: ModelSource) -> Conversion:
    """Return the conversion of a source that was opened with `options`.

    Raises UserError for a source that cannot be converted, and for settings that need a float model.
    """
    checkpoint = source.checkpoint
    model, files, ignored = _open(options, config, source)
    if model.config != source.shape:  # the files hold an output head that is not tied
        untied = checkpoint.config.values | {"tie_word_embeddings": False}
        checkpoint = replace(checkpoint, config=ConfigReader(untied, str(checkpoint.path)))
    num_source_bytes = sum(entry.nbytes for entry in entries_of(files))
    matched = match_tensors(model, files, ignored)
    if config.lora is not None:
        files = merge_lora(files, Path(config.lora).expanduser(), model)
    dtype = DTYPES.get(config.dtype.name)
    if dtype is not None:
        files = [CastFile(file, model, matched, dtype) for file in files]
    checkpoint = replace(checkpoint, open_weights=lambda expected: files)
    return Conversion(checkpoint, model, files, matched, dtype, num_source_bytes)


def _open(
    options: ModelConfig, config: ConvertConfig, source: ModelSource
) -> tuple[CausalLM, list[WeightFile], tuple[str, ...]]:
    """Return the model on the meta device, its files, and the name suffixes of tensors that are not parameters.

    A quantised model keeps the layers of its files. Raises UserError for settings that need a float model.
    """
    if source.exported is not None:
        raise UserError(f"{source.checkpoint.path} is exported already: give the model that it was made of")
    if source.checkpoint.path.suffix == ".gguf" or not source.is_quantized:  # GGUF codes become floats
        model, files = open_model(source.architecture, source.shape, source.checkpoint)
        return model, files, source.architecture.ignored_tensors
    for name, is_given in {
        "dtype": config.dtype is not ConvertDType.auto,
        "lora": config.lora is not None,
        "format": config.format is CheckpointFormat.gguf,
    }.items():
        if is_given:
            raise UserError(
                f"convert.{name}={typed(getattr(config, name))} needs floats, but {source.checkpoint.path} is quantised: "
                "give the float model"
            )
    plan = plan_model(options, QuantConfig(), source, torch.device("cpu"), packed=False)
    return plan.model, plan.files, plan.ignored_tensors
