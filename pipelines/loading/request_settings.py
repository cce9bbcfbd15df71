"""The settings that the engine needs to check and complete requests.

They are read from the checkpoint before its weights.
"""

import logging
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from conf.schema import ModelConfig
from models.formats import open_tokenizer
from models.formats.hub import find_tokenizer
from models.tokenizers import Tokenizer
from pipelines.engine.request import ContextLimit
from pipelines.loading.generation_config import decode_defaults, eos_token_ids
from pipelines.loading.model_source import ModelSource

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestSettings:
    tokenizer: Tokenizer | None
    context: ContextLimit
    eos_token_ids: frozenset[int]
    decode_defaults: dict[str, Any]
    """Values of DecodeConfig for settings that a request leaves unset."""


def read_request_settings(config: ModelConfig, source: ModelSource) -> RequestSettings:
    """Read the settings. Raises UserError for a tokenizer that cannot be read, and for wrong values in the files."""
    context = _context(config, source)
    tokenizer = _tokenizer(config, source)
    suggested = source.checkpoint.generation_config
    eos = eos_token_ids(suggested, source.checkpoint.config, tokenizer)
    return RequestSettings(tokenizer, context, eos, decode_defaults(suggested, context.num_tokens))


def _context(config: ModelConfig, source: ModelSource) -> ContextLimit:
    shape, configured = source.shape, source.checkpoint.config.raw("max_position_embeddings")
    stretched = configured is not None and configured != shape.context_length
    limit = ContextLimit(shape.context_length, f"{'stretched ' if stretched else ''}max_position_embeddings")
    if config.max_length is None:
        return limit
    if config.max_length > limit.num_tokens:
        raise UserError(
            f"model.max_length={config.max_length} is more than the model's {limit}: give at most {limit.num_tokens}"
        )
    return ContextLimit(config.max_length, "model.max_length")


def _tokenizer(config: ModelConfig, source: ModelSource) -> Tokenizer | None:
    if config.tokenizer is None:
        return None
    folder = find_tokenizer(config.tokenizer, config.hub, config.revision) if config.tokenizer else None
    tokenizer = open_tokenizer(folder) if folder else source.checkpoint.load_tokenizer()
    if folder and tokenizer is None:
        raise UserError(
            f"model.tokenizer={config.tokenizer} is not a folder with tokenizer files: give such a folder, a GGUF file, a hub id, "
            "or null for none"
        )
    vocab_size = source.shape.vocab_size
    if tokenizer and tokenizer.size > vocab_size:
        log.warning(
            "the tokenizer in %s has ids up to %s, but the model's vocabulary is %s: prompts with such ids are errors",
            tokenizer.source,
            tokenizer.size - 1,
            vocab_size,
        )
    return tokenizer
