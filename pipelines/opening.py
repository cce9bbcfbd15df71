"""Stage 1 of an engine: the checkpoint of `model.path`, found, verified and opened once. Every stage and task reads it from here."""

import logging
from dataclasses import dataclass, replace

from conf.errors import UserError
from conf.schema import ModelConfig, Weights
from models.causal_lm import ModelShape
from models.formats import open_checkpoint
from models.formats.base import Checkpoint
from models.formats.hub import find_checkpoint
from models.formats.manifest import verify_manifest
from models.heads import Head
from models.registry import Architecture, find_architecture
from quantization.layouts.gguf import read_gguf_quantization

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint whose config is read. Its weights and its tokenizer are opened by who needs them."""

    checkpoint: Checkpoint
    architecture: Architecture
    shape: ModelShape
    has_weights: bool
    """False with model.weights=random, which takes the config alone."""

    @property
    def is_quantized(self) -> bool:
        """Whether the files hold quantised weights."""
        if self.checkpoint.path.suffix == ".gguf":  # only its tensors say it
            return read_gguf_quantization(self.checkpoint.open_weights({})) is not None
        return self.checkpoint.config.section("quantization_config") is not None

    def warn_of_unread_keys(self) -> None:
        """Warn of keys of the config that may mean something and that no stage has read."""
        if unread := self.checkpoint.config.unread():
            log.warning("the config in %s has keys that are not used: %s", self.checkpoint.path, ", ".join(unread))


def open_source(config: ModelConfig, head: Head | None = Head.vocabulary) -> ModelSource:
    """Open the checkpoint of `model.path`; with `model.verify` all its files are compared with the manifest first.

    `head` is what its model needs; None: the checkpoint's own. Raises UserError where there is none, where it is damaged, for a config
    that no architecture here has, and for a checkpoint without the vocabulary's head where that is needed.
    """
    has_weights = config.weights is Weights.checkpoint
    path = find_checkpoint(config.path, has_weights, config.allow_pickle)
    if config.verify:
        verify_manifest(path)
    checkpoint = open_checkpoint(path, config.allow_pickle)
    architecture = find_architecture(checkpoint.config)
    if head is Head.vocabulary and architecture.head is Head.labels:
        names = ", ".join(checkpoint.config.raw("architectures"))
        raise UserError(f"{path} is a {names}, which scores a text and predicts no token: give task=score")
    if head is Head.none:
        architecture = replace(architecture, head=Head.none)
    return ModelSource(checkpoint, architecture, architecture.read_config(checkpoint.config), has_weights)
