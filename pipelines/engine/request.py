"""The nouns of the engine: Request in, Sequence while it runs, Output at the end."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Protocol

from conf.decoding import NEUTRAL, DecodeConfig
from conf.errors import UserError
from pipelines.engine.detokenizer import Detokenizer
from pipelines.engine.ngrams import NgramIndex

DEFAULT_MAX_NEW_TOKENS = 256


class FinishReason(Enum):
    stop = "stop"  # eos, a stop token or a stop string
    length = "length"
    no_token = "no_token"  # every token was banned
    error = "error"  # the request was refused, or failed inside the engine


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
    n: int
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    num_return_sequences: int
    penalty_alpha: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    logit_bias: dict[int, float]
    bad_words: tuple[tuple[int, ...], ...]
    """Token ids, as the tokenizer writes each word."""
    allowed_token_ids: list[int]
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    """The stop tokens and, unless it is ignored, the model's eos."""
    include_stop: bool
    seed: int
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool
    prefix_cache: bool
    cache_salt: str | None

    @property
    def samples(self) -> bool:
        """Whether the seed decides the tokens; beams and contrastive search have temperature 0."""
        return self.temperature > 0

    @property
    def num_sequences(self) -> int:
        """The most sequences that the request has at once."""
        return max(self.n, self.num_beams, self.top_k if self.penalty_alpha else 1)


def resolve_sampling_params(
    decode: DecodeConfig,
    num_prompt_tokens: int,
    context: ContextLimit,
    eos_token_ids: frozenset[int],
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """From resolved settings. Raises UserError where the prompt and the tokens asked for do not fit."""
    stop_token_ids = frozenset(decode.stop_token_ids)
    values: dict[str, Any] = {
        **{field.name: getattr(decode, field.name, None) for field in fields(SamplingParams)},
        **{name: value for name, value in NEUTRAL.items() if getattr(decode, name) is None},
        "max_new_tokens": _resolve_max_new_tokens(decode, num_prompt_tokens, context),
        "logit_bias": decode.logit_bias or {},
        "bad_words": bad_words,
        "stop": tuple(decode.stop),
        "stop_token_ids": stop_token_ids,
        "end_token_ids": stop_token_ids if decode.ignore_eos else stop_token_ids | eos_token_ids,
        "seed": random.getrandbits(64) if decode.seed is None else decode.seed,
    }
    return SamplingParams(**values)


def check_max_length(decode: DecodeConfig, context: ContextLimit) -> None:
    """Raises UserError for a length that no prompt could have."""
    most = context.num_tokens
    if decode.max_length is not None and decode.max_length > most:
        raise UserError(
            f"decode.max_length={decode.max_length} is more than the model takes ({context}): give at most {most}"
        )


def too_many_new_tokens(max_new_tokens: int, num_prompt_tokens: int | None, context: ContextLimit) -> UserError:
    """More than fit after any prompt. The error names the number that fits after this one, where its length is known."""
    number = ""
    if num_prompt_tokens is not None:
        number = f"at most {context.num_tokens - num_prompt_tokens} with {num_prompt_tokens} tokens of prompt, or "
    what = f"decode.max_new_tokens={max_new_tokens} is more than the model takes ({context})"
    return UserError(f"{what}: give {number}auto, which is as many as fit after each prompt")


def _resolve_max_new_tokens(decode: DecodeConfig, num_prompt_tokens: int, context: ContextLimit) -> int:
    check_max_length(decode, context)
    room = context.num_tokens - num_prompt_tokens
    if room < 1:
        raise UserError(f"the prompt has {num_prompt_tokens} tokens, which leaves no room for new ones ({context})")
    max_new_tokens = min(DEFAULT_MAX_NEW_TOKENS, room)
    if isinstance(decode.max_new_tokens, int):
        max_new_tokens = decode.max_new_tokens
    elif decode.max_new_tokens == "auto" or decode.max_length is not None:
        max_new_tokens = room
    if decode.max_length is not None:
        max_new_tokens = min(max_new_tokens, decode.max_length - num_prompt_tokens)
    if max_new_tokens < 1:
        raise UserError(
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room for new ones (decode.max_length={decode.max_length})"
        )
    if max_new_tokens >= context.num_tokens:
        raise too_many_new_tokens(max_new_tokens, num_prompt_tokens, context)
    if max_new_tokens > room:
        raise UserError(
            f"the prompt has {num_prompt_tokens} tokens and decode.max_new_tokens={max_new_tokens}, together more than {context}: "
            f"give at most {room} new tokens"
        )
    if (decode.min_new_tokens or 0) > max_new_tokens:
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
    prompt_marks: tuple[int, ...] = ()
    """What the model wants to know of the prompt in every step."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities of one step, from the unmodified distribution: the chosen token's and the most likely ones'."""

    logprobs: dict[int, float]
    """Token id to log probability; the chosen token is always in."""
    ranks: dict[int, int]
    """Token id to rank, 1 for the most likely."""


@dataclass(eq=False)  # a sequence is itself, not its contents
class Sequence:
    """One continuation of a prompt on its way. The scheduler writes the counts and blocks, the engine the rest."""

    request: Request
    detokenizer: Detokenizer | None
    token_ids: list[int]
    """Prompt and output."""
    sample: int = 0
    """Which of the request's n samples it is."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    first_wanted: int | None = None
    """Position of the first token whose output (logits and hidden state) is wanted; None: only the last token's is."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Of the first full blocks; filled as far as anybody needed them."""
    is_past_border: bool = False
    """Whether its keys are those of a text that is longer than the model's `key_border`."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ngrams: NgramIndex | None = None
    """Of its tokens, once somebody asked which may not follow."""
    unsent: str = ""
    """New text that the request's sink has not had yet."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def fork(self) -> "Sequence":
        """A copy that goes its own way. It shares no lists, but its block table names the same blocks: the scheduler counts them."""
        return replace(
            self,
            detokenizer=self.detokenizer and self.detokenizer.copy(),
            token_ids=list(self.token_ids),
            block_table=list(self.block_table),
            block_hashes=list(self.block_hashes),
            logprobs=list(self.logprobs),
            ngrams=self.ngrams and self.ngrams.copy(),
        )


@dataclass(frozen=True)
class Continuation:
    """A sequence and the token that follows it."""

    parent: Sequence
    token_id: int


class Search(Protocol):
    """How the next tokens are chosen where a group's sequences compete for them. Its tensors are Any, for this file imports no torch."""

    def observe(self, hidden: Any) -> None:
        """Hidden states [P, E] of tokens that were just computed: the prompt's, then those of the group's sequences. Overwritten by the
        next step."""

    def advance(self, group: "SequenceGroup", logits: Any) -> list[Continuation]:
        """The sequences that go on, from logits [S, V] of the group's S sequences; at the end none, and the group has completions."""

    def restart(self, group: "SequenceGroup") -> Sequence:
        """After a preemption: the one sequence to begin with again."""

    def recompute(self, group: "SequenceGroup") -> None:
        """The group's sequences stay, and will be computed again from their first tokens on, because their keys are other ones now."""


@dataclass(eq=False)
class SequenceGroup:
    """A request on its way. Its sequences run, wait and give way together; it is finished when none is left."""

    request: Request
    origin: Sequence
    """The prompt, as it was before anything was computed."""
    search: Search | None
    """None for greedy tokens and samples, which do not compete."""
    sequences: list[Sequence] = field(default_factory=list)
    """Those that still grow."""
    completions: dict[int, "Completion"] = field(default_factory=dict)
    """By sample, or by rank in a search."""
    num_cached_tokens: int | None = None
    """Prompt tokens that another request had computed before; None until the group is admitted."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: BaseException | None = None
    """Why the request failed; then it has no sequences."""

    def __post_init__(self) -> None:
        self.sequences = [self.origin.fork()]

    @property
    def num_output_tokens(self) -> int:
        """Of the longest sequence so far, without a candidate that may still be rejected."""
        candidate = 1 if self.request.params.penalty_alpha else 0
        growing = [sequence.num_output_tokens - candidate for sequence in self.sequences]
        return max(0, *growing, *(len(completion.token_ids) for completion in self.completions.values()))

    def restart(self) -> None:
        """After a preemption. A single sequence goes on where it was; several began with blocks that they shared, so they begin again."""
        if self.search:
            self.sequences = [self.search.restart(self)]
        elif self.request.params.n > 1:
            self.sequences = [self.origin.fork()]
            self.completions.clear()


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt. `text` is None where the engine has no tokenizer."""

    token_ids: list[int]
    """New tokens, with the stop token if one ended the row."""
    text: str | None
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    score: float | None = None
    """Of a beam: the sum of its tokens' log probabilities over its length to the power of length_penalty."""


@dataclass(frozen=True)
class Output:
    """A finished request, or one that failed."""

    request_id: int
    completions: list[Completion]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache spared."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on."""
    error: BaseException | None = None
    """Why the request failed on its way; then there are no completions. The other requests went on."""
