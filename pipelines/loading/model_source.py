"""Stage 1 of loading an engine: find, verify and open the checkpoint of `model.path`, once.

All later stages and all tasks read the checkpoint through the ModelSource that this stage returns.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import DType, ModelConfig, Weights
from models.causal_lm import ModelShape
from models.exported.description import EXPORT, Description, read_description
from models.formats import open_checkpoint
from models.formats.base import Checkpoint
from models.formats.hub import find_checkpoint, find_tokenizer
from models.formats.manifest import verify_manifest
from models.formats.sentence_transformers import is_embedding_model
from models.heads import HeadKind
from models.meta_model import open_model
from models.registry import Architecture, find_architecture
from quantization.layouts.gguf import read_gguf_quantization
from quantization.layouts.sparsity import read_sparsity

log = logging.getLogger(__name__)

EXPORTED = Architecture("", "", "")  # an exported model needs no code of a model family


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint whose config is read. Weights and tokenizer are opened later, where they are needed."""

    checkpoint: Checkpoint
    architecture: Architecture
    shape: ModelShape
    has_weights: bool
    """False with model.weights=random, which uses only the config."""
    exported: Description | None = None
    """The description of a model that `task=export` wrote; it replaces weights and architecture code. Else None."""

    @property
    def is_quantized(self) -> bool:
        if self.exported is not None:
            return True  # its files hold the quantised and packed model
        if self.checkpoint.path.suffix == ".gguf":  # only the tensors of a GGUF file show whether it is quantised
            return read_gguf_quantization(self.checkpoint.open_weights({})) is not None
        sparsity = read_sparsity(self.checkpoint.config)
        is_pruned_alone = sparsity is not None and sparsity.is_alone
        return self.checkpoint.config.section("quantization_config") is not None and not is_pruned_alone

    def with_mtp_layer(self) -> "ModelSource":
        """Return the source with its MTP layer. Raises UserError if config.json or the files do not have an MTP layer."""
        shape = self.shape.with_mtp_layer()
        if shape is not None and self.has_weights:
            model, files = open_model(self.architecture, shape, self.checkpoint)
            layer = f"{model.layout.layers}.{shape.num_hidden_layers}."
            if not any(name.startswith(layer) for file in files for name in file.shapes):
                shape = None
        if shape is None:
            raise UserError(
                f"decode.speculate=mtp needs a layer that predicts further tokens, as DeepSeek-V3 has one, and {self.checkpoint.path} "
                "has none: give decode.speculate=ngram, or another checkpoint"
            )
        return replace(self, shape=shape)

    def warn_of_unread_keys(self) -> None:
        """Warn of config keys that may have a meaning and that no stage has read."""
        if self.exported is None and (unread := self.checkpoint.config.unread()):
            log.warning("the config in %s has keys that are not used: %s", self.checkpoint.path, ", ".join(unread))


@dataclass(frozen=True)
class ReadyModel:
    """A model that can be loaded without calibration."""

    source: ModelSource
    """Its checkpoint."""
    options: ModelConfig
    """The options with which the checkpoint was opened."""
    quant: QuantConfig
    """The options of quantisation that loading still applies."""


OpenModel = Callable[[HeadKind | None], ModelSource]
"""A function that opens the checkpoint of a run, as `resolve_model` does. Its argument is the head that the task needs."""


def replace_model_path(model: ModelConfig, folder: Path) -> ModelConfig:
    """Return the settings of `model` with `folder` as the path. The model in `folder` was made from `model`.

    The result has no revision, but a tokenizer from a hub is still the tokenizer of the old revision.
    """
    tokenizer = model.tokenizer
    if tokenizer and model.revision is not None:
        tokenizer = str(find_tokenizer(tokenizer, model.hub, model.revision))
    return replace(model, path=str(folder), tokenizer=tokenizer, revision=None)


def resolve_model(config: ModelConfig, head: HeadKind | None = HeadKind.vocabulary) -> ModelSource:
    """Open the checkpoint of `model.path`. With `model.verify` all its files are first compared with the manifest.

    `head`: the head that the task needs. None: the checkpoint's own head; an embedding model has none. Raises UserError
    if the checkpoint is missing or damaged, if its architecture is not supported, and if the task needs a vocabulary head
    that it lacks.
    """
    path = find_checkpoint(
        config.path, config.weights is Weights.checkpoint, config.allow_pickle, config.hub, config.revision
    )
    if config.verify:
        verify_manifest(path)
    checkpoint = open_checkpoint(path, config.allow_pickle)
    if (path / EXPORT).is_file():
        return _open_exported(config, checkpoint, head)
    return source_of(config, checkpoint, head)


def source_of(config: ModelConfig, checkpoint: Checkpoint, head: HeadKind | None) -> ModelSource:
    """Return the source of a checkpoint that is not an export. `head` and the UserErrors: as for `resolve_model`."""
    architecture = find_architecture(checkpoint.config)
    if head is HeadKind.vocabulary and architecture.head is HeadKind.labels:
        names = ", ".join(checkpoint.config.raw("architectures"))
        raise UserError(f"{checkpoint.path} is a {names}, which scores a text and predicts no token: give task=score")
    if _is_without_head(checkpoint, head):
        architecture = replace(architecture, head=HeadKind.none)
    has_weights = config.weights is Weights.checkpoint
    return ModelSource(checkpoint, architecture, architecture.read_config(checkpoint.config), has_weights)


def _is_without_head(checkpoint: Checkpoint, head: HeadKind | None) -> bool:
    return head is HeadKind.none or (head is None and is_embedding_model(checkpoint.path))


def _open_exported(config: ModelConfig, checkpoint: Checkpoint, head: HeadKind | None) -> ModelSource:
    description = read_description(checkpoint.path)
    dtype = str(description.dtype).removeprefix("torch.")
    if config.dtype not in (DType.auto, DType[dtype]):
        raise UserError(
            f"model.dtype={config.dtype.name} contradicts {checkpoint.path}, which was exported in {dtype}: leave it out"
        )
    refused = {
        "model.weights=random": config.weights is Weights.random,
        "model.keep_packed=true": config.keep_packed,
    }
    for option, is_given in refused.items():
        if is_given:
            raise UserError(
                f"{option} is not used by an exported model: leave it out, or give the model that it was made of"
            )
    architecture = replace(EXPORTED, head=HeadKind.none) if _is_without_head(checkpoint, head) else EXPORTED
    return ModelSource(checkpoint, architecture, description.shape, True, description)
