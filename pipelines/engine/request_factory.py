"""Creates checked requests from numbers and a tokenizer. Needs no model and no torch, so any process can do it."""

import functools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from conf.decoding import NEUTRAL, DecodeConfig, warn_once
from conf.errors import UserError, list_known_names, shortened
from conf.speculation import DraftOrder, Speculate
from models.capabilities import ModelCapabilities
from models.tokenizers.base import Tokenizer
from pipelines.engine.dry import Breakers, find_breakers
from pipelines.engine.engine_config import EngineConfig
from pipelines.engine.guide import Guides
from pipelines.engine.request import (
    NO_PREFIX,
    ContextLimit,
    PlacedPrefix,
    Pooling,
    Request,
    SamplingParams,
    Sink,
)
from pipelines.engine.state_manager import StateManager
from pipelines.engine.thinking import Thinking

DEFAULT_MAX_NEW_TOKENS = 256
NUM_KEPT = 64  # cached lists of bad_words


@dataclass(frozen=True)
class RequestFactory:
    """Creates the requests of one engine, and refuses requests that the engine can never run."""

    tokenizer: Tokenizer | None
    vocab_size: int
    capabilities: ModelCapabilities
    config: EngineConfig
    num_blocks: int
    """Blocks of the KV cache that requests can use."""
    block_size: int
    num_state_slots: int = 0
    """Slots for recurrent states; 0 if no layer of the model is recurrent."""
    max_window_sequences: int | None = None
    """The most sequences that the blocks of layers with windows hold; None: any number."""
    prefixes: Mapping[str, PlacedPrefix] = field(default_factory=dict)
    """The prefixes that requests can name."""

    @functools.cached_property
    def guides(self) -> Guides:
        return Guides(self.tokenizer, self.vocab_size, self.config.eos_token_ids)

    @functools.cached_property
    def _bad_words(self) -> Callable[[tuple[str, ...]], tuple[tuple[int, ...], ...]]:
        return functools.lru_cache(NUM_KEPT)(self._encode_words)

    @functools.cached_property
    def _breakers_of(self) -> Callable[[tuple[str, ...]], Breakers]:
        return functools.lru_cache(NUM_KEPT)(self._find_breakers)

    def prepare(self, decode: DecodeConfig) -> None:
        """Precompute the slow parts of `make` that depend only on the settings. Thread-safe.

        Raises UserError for a guide as `Guides` does.
        """
        if decode.bad_words and self.tokenizer is not None:
            self._bad_words(tuple(decode.bad_words))
        self._breakers(decode)
        if decode.guide is not None:
            self.guides.begin(decode.guide)

    def resolve(self, decode: DecodeConfig) -> DecodeConfig:
        """Return the settings with unset values filled in: from the checkpoint's defaults, else neutral values."""
        return decode.resolved(self.config.decode_defaults)

    def make(
        self,
        id: int,
        prompt_token_ids: list[int],
        decode: DecodeConfig,
        sink: Sink | None = None,
        prediction_token_ids: list[int] | None = None,
        prefix: str | None = None,
    ) -> Request:
        """Return a checked request, with the prefix of this name.

        `prediction_token_ids`: the expected output, from which drafts are copied. Raises UserError for ids outside the
        vocabulary, lengths that do not fit, an unknown prefix, and for a guide as `Guides` does.
        """
        self._check_prompt(prompt_token_ids)
        decode = self.resolve(decode)
        self.check(decode)
        if not self.capabilities.shares_prefixes:
            decode = replace(decode, prefix_cache=False)
        bad_words, placed = self._bad_words(tuple(decode.bad_words)), self.prefix(prefix)
        num_prompt = len(prompt_token_ids)
        context = replace(self.config.context, num_prefix_tokens=placed.num_tokens)
        params = resolve_sampling_params(decode, num_prompt, context, self.config.eos_token_ids, bad_words)
        params = replace(params, dry_breakers=self._breakers(decode))
        if sink is not None and params.num_beams > 1:
            raise UserError(
                f"decode.num_beams={params.num_beams} cannot be streamed, because it has no single text that grows: give no streamer"
            )
        self._check_size(params, num_prompt, placed.num_tokens)
        prediction = prediction_token_ids or []
        self._check_prediction(prediction, params)
        guide = None if decode.guide is None else self.guides.begin(decode.guide)
        thinking = self._begin_thinking(decode, prompt_token_ids)
        return Request(id, prompt_token_ids, params, sink, prediction, placed, guide=guide, thinking=thinking)

    def _begin_thinking(self, decode: DecodeConfig, prompt_token_ids: list[int]) -> Thinking | None:
        if decode.thinking.max_tokens is None:
            return None
        thinking = Thinking.begin(decode.thinking, self.tokenizer, prompt_token_ids)
        self.check_ids("token id of decode.thinking.closing", thinking.limit.closing)
        return thinking

    def _check_prediction(self, token_ids: list[int], params: SamplingParams) -> None:
        self.check_ids("prediction token id", token_ids)
        speculate, order = params.speculate, params.speculation.order
        if token_ids and (speculate, order) != (Speculate.ngram, DraftOrder.longest):
            drafts = f"decode.speculate={speculate.name} decode.speculation.order={order.name}"
            warn_once(f"a row's prediction is not used with {drafts}: give decode.speculate=ngram and order=longest")

    def prefix(self, name: str | None) -> PlacedPrefix:
        """Return the prefix of this name. Raises UserError for an unknown name."""
        if name is None:
            return NO_PREFIX
        if name not in self.prefixes:
            known = list_known_names(self.prefixes, name) if self.prefixes else "give model.prefixes={NAME: PATH}"
            raise UserError(f"prefix {shortened(repr(name))} does not exist: {known}")
        return self.prefixes[name]

    def make_pooled(
        self, id: int, prompt_token_ids: list[int], pooling: Pooling, decode: DecodeConfig, prefix: str | None = None
    ) -> Request:
        """Return a checked request for the prompt's vector, with the prefix of this name.

        Of `decode` it reads only `prefix_cache` and `cache_salt`. Raises UserError as `make` does, and for any other
        setting of `decode`.
        """
        self._check_prompt(prompt_token_ids)
        check_pooled(decode)
        num_prompt, placed = len(prompt_token_ids), self.prefix(prefix)
        context = replace(self.config.context, num_prefix_tokens=placed.num_tokens)
        if num_prompt > context.num_places:
            remedy = f"shorten it to at most {context.num_places}"
            raise UserError(f"the prompt has {num_prompt} tokens, more than the model takes ({context}): {remedy}")
        prefix_cache = decode.prefix_cache and self.capabilities.shares_prefixes
        params = _sampling_params(replace(decode, prefix_cache=prefix_cache, seed=0).resolved({}), 0, frozenset(), ())
        self._check_size(params, num_prompt, placed.num_tokens)
        return Request(id, prompt_token_ids, params, prefix=placed, pooling=pooling)

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise UserError("the prompt has no tokens, and the tokenizer adds no BOS: give a prompt with text")
        self.check_ids("prompt token id", token_ids)

    def check(self, decode: DecodeConfig) -> None:
        """Raise UserError for settings that are invalid with every prompt."""
        check_max_length(decode, self.config.context)
        if reason := self.config.unavailable_proposers.get(decode.speculate):
            raise UserError(f"decode.speculate={decode.speculate.name} {reason}")
        self.check_ids("stop token id", decode.stop_token_ids)
        self.check_ids("allowed token id", decode.allowed_token_ids)
        self.check_ids("logit_bias token id", decode.logit_bias or {})
        sequences = [*(decode.bad_words_ids or []), *(ids for ids, _ in decode.sequence_bias or [])]
        self.check_ids("token id of a sequence", chain.from_iterable(sequences))
        self.check_ids("suppressed token id", decode.suppress_tokens or [])
        self.check_ids("forced token id", [*_ids(decode.forced_bos_token_id), *_ids(decode.forced_eos_token_id)])
        for name in ("stop", "bad_words"):
            if getattr(decode, name) and self.tokenizer is None:
                remedy = "give token ids instead, or model.tokenizer=PATH"
                raise UserError(f"decode.{name}={getattr(decode, name)} needs a tokenizer: {remedy}")
        breakers = decode.dry_sequence_breakers
        if breakers not in (None, [], NEUTRAL["dry_sequence_breakers"]) and self.tokenizer is None:
            raise UserError(f"decode.dry_sequence_breakers={breakers} needs a tokenizer: give model.tokenizer=PATH")
        if decode.guide is not None:
            self.guides.begin(decode.guide)
        self._begin_thinking(decode, [])

    def _breakers(self, decode: DecodeConfig) -> Breakers:
        """Return the breakers of DRY; none without a tokenizer."""
        if not decode.dry_multiplier or self.tokenizer is None:
            return {}
        texts = decode.dry_sequence_breakers
        return self._breakers_of(tuple(NEUTRAL["dry_sequence_breakers"] if texts is None else texts))

    def _find_breakers(self, texts: tuple[str, ...]) -> Breakers:
        assert self.tokenizer is not None
        tokenizer = self.tokenizer
        pieces = [tokenizer.token_bytes(id) or b"" for id in range(self.vocab_size)]
        return find_breakers(pieces, texts, lambda text: tokenizer.encode(text, False))

    def check_ids(self, kind: str, ids: Iterable[int]) -> None:
        """Raise UserError for an id that is not in the vocabulary. `kind` names the ids in the message."""
        if wrong := [id for id in ids if not 0 <= id < self.vocab_size]:
            raise UserError(f"{kind} {wrong[0]} is not in the vocabulary: give ids from 0 to {self.vocab_size - 1}")

    def _encode_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word, at the start of a text and after a space."""
        if not words:
            return ()
        assert self.tokenizer is not None
        written = [self.tokenizer.encode(text, False) for word in words for text in (word, f" {word}")]
        return tuple(dict.fromkeys(tuple(ids) for ids in written if ids))

    def _check_size(self, params: SamplingParams, num_prompt_tokens: int, num_prefix_tokens: int) -> None:
        num_tokens, width = num_prompt_tokens + params.max_new_tokens, params.num_sequences
        threshold = self.capabilities.long_rope_threshold
        num_needed_blocks = max_blocks(params, num_prompt_tokens, self.block_size, threshold, num_prefix_tokens)
        if num_needed_blocks > self.num_blocks:
            problem = f"prompt and new tokens are {num_tokens}" + (f", in {width} sequences" if width > 1 else "")
            capacity = self.num_blocks * self.block_size
            remedy = "raise device.kv_cache_memory" + (", or ask for fewer new tokens" if params.max_new_tokens else "")
            raise UserError(f"{problem}, but the KV cache holds {capacity}: {remedy}")
        if self.capabilities.needs_whole_prompt and num_tokens > self.config.max_batched_tokens:
            raise UserError(
                f"prompt and new tokens are {num_tokens}, but this model's prompts cannot be computed in chunks "
                f"and device.max_batched_tokens={self.config.max_batched_tokens}: raise it, or ask for fewer new tokens"
            )
        if self.num_state_slots and (needed := StateManager.num_needed(width)) > self.num_state_slots:
            problem = f"the request has {width} sequences, which need {needed} slots for recurrent states"
            remedy = "ask for fewer, or raise device.kv_cache_memory, decode.n or decode.num_beams"
            raise UserError(f"{problem}, but there are {self.num_state_slots}: {remedy}")
        if self.max_window_sequences is not None and width > self.max_window_sequences:
            remedy = "ask for fewer, or raise device.kv_cache_memory, decode.n or decode.num_beams"
            problem = f"the request has {width} sequences, but layers with windows have blocks"
            raise UserError(f"{problem} for {self.max_window_sequences}: {remedy}")
        if width > self.config.max_batched_tokens:
            limit = f"device.max_batched_tokens={self.config.max_batched_tokens}"
            remedy = "ask for fewer, or raise it, because each sequence needs one token in every step"
            raise UserError(f"the request has {width} sequences, but {limit}: {remedy}")


def max_blocks(
    params: SamplingParams,
    num_prompt_tokens: int,
    block_size: int,
    long_rope_threshold: int | None = None,
    num_prefix_tokens: int = 0,
) -> int:
    """Return the maximum number of blocks that a request owns, without the full blocks of its prefix.

    A request that needs more than the pool has would wait forever.
    """
    num_tokens = num_prefix_tokens + num_prompt_tokens + params.max_new_tokens
    # Sequences share the prompt's full blocks. Candidates of contrastive search share all blocks except
    # the block with their own token.
    num_shared = (num_tokens - 1 if params.penalty_alpha else num_prefix_tokens + num_prompt_tokens) // block_size
    if long_rope_threshold is not None and num_prompt_tokens <= long_rope_threshold < num_tokens:
        num_shared = 0  # each sequence is computed again without sharing
    num_blocks = num_shared + params.num_sequences * (-(-num_tokens // block_size) - num_shared)
    return num_blocks - num_prefix_tokens // block_size


def resolve_sampling_params(
    decode: DecodeConfig,
    num_prompt_tokens: int,
    context: ContextLimit,
    eos_token_ids: frozenset[int],
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """Resolve complete settings for one prompt. Raises UserError if the prompt and its new tokens do not fit."""
    max_new_tokens = _resolve_max_new_tokens(decode, num_prompt_tokens, context)
    least = max(0, (decode.min_length or 0) - num_prompt_tokens)
    min_new_tokens = decode.min_new_tokens or min(max_new_tokens, least)
    params = _sampling_params(decode, max_new_tokens, eos_token_ids, bad_words)
    first = decode.forced_bos_token_id if num_prompt_tokens == 1 else []  # as in transformers
    return replace(params, min_new_tokens=min_new_tokens, first_token_ids=tuple(_ids(first)))


def check_pooled(decode: DecodeConfig) -> None:
    """Raise UserError for a setting that a pooled request does not read."""
    replace(decode, prefix_cache=True, cache_salt=None).check_unset("where nothing is generated", "leave it out")


def _sampling_params(
    decode: DecodeConfig, max_new_tokens: int, eos_token_ids: frozenset[int], bad_words: tuple[tuple[int, ...], ...]
) -> SamplingParams:
    stop_token_ids = frozenset(decode.stop_token_ids)
    banned = [ids for ids in map(tuple, decode.bad_words_ids or []) if len(ids) > 1 or ids[0] not in eos_token_ids]
    names = [field.name for field in fields(SamplingParams)]
    values: dict[str, Any] = {
        **{name: getattr(decode, name, None) for name in names},
        **{name: value for name, value in NEUTRAL.items() if name in names and getattr(decode, name) is None},
        "max_new_tokens": max_new_tokens,
        "logit_bias": decode.logit_bias or {},
        "bad_words": (*bad_words, *banned, *((id,) for id in decode.suppress_tokens or [])),
        "sequence_bias": tuple((tuple(ids), bias) for ids, bias in decode.sequence_bias or []),
        "first_token_ids": (),
        "dry_breakers": {},
        "last_token_ids": tuple(_ids(decode.forced_eos_token_id)),
        "stop": tuple(decode.stop),
        "stop_token_ids": stop_token_ids,
        "end_token_ids": stop_token_ids if decode.ignore_eos else stop_token_ids | eos_token_ids,
        "seed": random.getrandbits(64) if decode.seed is None else decode.seed,
    }
    return SamplingParams(**values)


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def check_max_length(decode: DecodeConfig, context: ContextLimit) -> None:
    """Raise UserError for a max_length that is longer than the context."""
    limit = context.num_tokens
    if decode.max_length is not None and decode.max_length > limit:
        raise UserError(
            f"decode.max_length={decode.max_length} is more than the model takes ({context}): give at most {limit}"
        )


def too_many_new_tokens(max_new_tokens: int, num_prompt_tokens: int | None, context: ContextLimit) -> UserError:
    """Return the error for too many new tokens. It states the limit for this prompt, if its length is known."""
    number = ""
    if num_prompt_tokens is not None:
        number = f"at most {context.num_places - num_prompt_tokens} with {num_prompt_tokens} tokens of prompt, or "
    problem = f"decode.max_new_tokens={max_new_tokens} is more than the model takes ({context})"
    return UserError(f"{problem}: give {number}auto, which uses all tokens that fit after each prompt")


def _resolve_max_new_tokens(decode: DecodeConfig, num_prompt_tokens: int, context: ContextLimit) -> int:
    check_max_length(decode, context)
    max_fitting = context.num_places - num_prompt_tokens
    if max_fitting < 1:
        remedy = f"shorten it to at most {context.num_places - 1}"
        raise UserError(
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room for new ones ({context}): {remedy}"
        )
    max_new_tokens = min(DEFAULT_MAX_NEW_TOKENS, max_fitting)
    if isinstance(decode.max_new_tokens, int):
        max_new_tokens = decode.max_new_tokens
    elif decode.max_new_tokens == "auto" or decode.max_length is not None:
        max_new_tokens = max_fitting
    if decode.max_length is not None:
        max_new_tokens = min(max_new_tokens, decode.max_length - num_prompt_tokens)
    if max_new_tokens < 1:
        raise UserError(
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room for new ones (decode.max_length={decode.max_length}): "
            "shorten it, or give a larger max_length"
        )
    if max_new_tokens >= context.num_places:
        raise too_many_new_tokens(max_new_tokens, num_prompt_tokens, context)
    if max_new_tokens > max_fitting:
        raise UserError(
            f"the prompt has {num_prompt_tokens} tokens and decode.max_new_tokens={max_new_tokens}, together more than {context}: "
            f"give at most {max_fitting} new tokens"
        )
    if (decode.min_new_tokens or 0) > max_new_tokens:
        raise UserError(
            f"decode.min_new_tokens={decode.min_new_tokens} is more than the {max_new_tokens} new tokens that fit: give at most that many"
        )
    return max_new_tokens
