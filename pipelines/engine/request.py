"""The nouns of the engine: Request in, Sequence while it runs, Output at the end."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from conf.errors import UserError
from conf.schema import DecodeConfig
from pipelines.engine.detokenizer import Detokenizer

DEFAULT_MAX_NEW_TOKENS = 256


class FinishReason(Enum):
    stop = "stop"  # eos, a stop token or a stop string
    length = "length"
    error = "error"  # the request was refused before it reached the engine


@dataclass(frozen=True)
class ContextLimit:
    """The most tokens that a sequence may have, and the setting that says so, for error messages."""

    num_tokens: int
    source: str

    def __str__(self) -> str:
        return f"{self.source}={self.num_tokens}"


@dataclass(frozen=True)
class SamplingParams:
    """A DecodeConfig resolved for one prompt: every limit a number, every stop token an id, a seed drawn where none was given."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    """Empty with ignore_eos."""
    seed: int
    logprobs: int | None
    skip_special_tokens: bool
    prefix_cache: bool


def resolve_sampling_params(
    decode: DecodeConfig, num_prompt_tokens: int, context: ContextLimit, eos_token_ids: frozenset[int]
) -> SamplingParams:
    """Raises UserError where the prompt and the tokens asked for do not fit."""
    return SamplingParams(
        max_new_tokens=_resolve_max_new_tokens(decode, num_prompt_tokens, context),
        min_new_tokens=decode.min_new_tokens,
        temperature=decode.temperature,
        top_k=decode.top_k,
        top_p=decode.top_p,
        min_p=decode.min_p,
        repetition_penalty=decode.repetition_penalty,
        presence_penalty=decode.presence_penalty,
        frequency_penalty=decode.frequency_penalty,
        stop=tuple(decode.stop),
        stop_token_ids=frozenset(decode.stop_token_ids),
        eos_token_ids=frozenset() if decode.ignore_eos else eos_token_ids,
        seed=random.getrandbits(64) if decode.seed is None else decode.seed,
        logprobs=decode.logprobs,
        skip_special_tokens=decode.skip_special_tokens,
        prefix_cache=decode.prefix_cache,
    )


def check_max_length(decode: DecodeConfig, context: ContextLimit) -> None:
    """Raises UserError for a length that no prompt could have."""
    for name in ("max_length", "max_new_tokens"):
        value = getattr(decode, name)
        if value is not None and value > context.num_tokens:
            raise UserError(
                f"decode.{name}={value} is more than the model takes ({context}): give at most {context.num_tokens}"
            )


def _resolve_max_new_tokens(decode: DecodeConfig, num_prompt_tokens: int, context: ContextLimit) -> int:
    check_max_length(decode, context)
    room = context.num_tokens - num_prompt_tokens
    if room < 1:
        raise UserError(f"the prompt has {num_prompt_tokens} tokens, which leaves no room for new ones ({context})")
    wanted = [
        n for n in (decode.max_new_tokens, decode.max_length and decode.max_length - num_prompt_tokens) if n is not None
    ]
    max_new_tokens = min(wanted, default=min(DEFAULT_MAX_NEW_TOKENS, room))
    if max_new_tokens < 1:
        raise UserError(
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room for new ones (decode.max_length={decode.max_length})"
        )
    if max_new_tokens > room:
        raise UserError(
            f"the prompt has {num_prompt_tokens} tokens and decode.max_new_tokens={max_new_tokens}, together more than {context}: "
            f"give at most {room} new tokens"
        )
    if decode.min_new_tokens > max_new_tokens:
        raise UserError(
            f"decode.min_new_tokens={decode.min_new_tokens} is more than the {max_new_tokens} new tokens that fit"
        )
    return max_new_tokens


@dataclass(frozen=True)
class Request:
    """Made by `Engine.request`, which checks it."""

    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    sink: Callable[[str], None] | None = None
    """Called with each piece of new text, as soon as it is certain."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities of one step, from the unmodified distribution: the chosen token's and the most likely ones'."""

    logprobs: dict[int, float]
    """Token id to log probability; the chosen token is always in."""
    ranks: dict[int, int]
    """Token id to rank, 1 for the most likely."""


@dataclass(eq=False)  # a sequence is itself, not its contents
class Sequence:
    """A request on its way. The scheduler writes the counts and blocks, the engine the rest."""

    request: Request
    detokenizer: Detokenizer | None
    token_ids: list[int]
    """Prompt and output."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    num_cached_tokens: int | None = None
    """Prompt tokens that another sequence had computed before; None until the sequence is admitted."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Of the first full blocks; filled as far as anybody needed them."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt. `text` is None where the engine has no tokenizer."""

    token_ids: list[int]
    """New tokens, with the stop token if one ended the row."""
    text: str | None
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True)
class Output:
    """A finished request."""

    request_id: int
    completions: list[Completion]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache spared."""
