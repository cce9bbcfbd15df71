"""The nouns of the engine: Request in, Sequence while it runs, Output at the end."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, TypeAlias

from conf.speculation import Speculate, SpeculationConfig
from pipelines.engine.adapter_slots import AdapterId
from pipelines.engine.detokenizer import Detokenizer
from pipelines.engine.guide import Guide
from pipelines.engine.ngrams import NgramIndex
from pipelines.engine.token_counts import TokenCounts


class FinishReason(Enum):
    stop = "stop"  # eos, a stop token, a stop string or the end of a guide
    length = "length"
    no_token = "no_token"  # every token was banned
    error = "error"  # the request was refused, or failed inside the engine


@dataclass(frozen=True)
class ContextLimit:
    """How many tokens a sequence may have, and the setting that says so, for error messages."""

    num_tokens: int
    source: str
    num_prefix_tokens: int = 0
    """Virtual tokens of a prefix, which take their places in the context."""

    @property
    def num_places(self) -> int:
        """How many tokens fit after the prefix."""
        return self.num_tokens - self.num_prefix_tokens

    def __str__(self) -> str:
        taken = f", of which a prefix takes {self.num_prefix_tokens}" if self.num_prefix_tokens else ""
        return f"{self.source}={self.num_tokens}{taken}"


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
    """Sequences of token ids: each word as the tokenizer writes it, bad_words_ids, and suppress_tokens one by one."""
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...]
    first_token_ids: tuple[int, ...]
    """Tokens of which one must be the first; empty: any."""
    last_token_ids: tuple[int, ...]
    """Tokens of which one must be the last of max_new_tokens; empty: any."""
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
    speculate: Speculate = Speculate.none
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    @property
    def samples(self) -> bool:
        """Whether the seed decides the tokens; beams and contrastive search have temperature 0."""
        return self.temperature > 0

    @property
    def num_sequences(self) -> int:
        """How many sequences the request has at once, at most."""
        return max(self.n, self.num_beams, self.top_k if self.penalty_alpha else 1)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities of one step, from the unmodified distribution: the chosen token's and the most likely ones'."""

    logprobs: dict[int, float]
    """Token id to log probability; the chosen token is always in."""
    ranks: dict[int, int]
    """Token id to rank, 1 for the most likely."""


Sink: TypeAlias = Callable[[int, list[int], str, list[TokenLogprobs]], None]
"""Takes the sample, its next token ids, the text that they made certain ("" where none is) and their log probabilities, if asked for.

The pieces of a sample, joined, are its completion.
"""


class Pooling(Enum):
    """The choice of the outputs of a prompt that become its vector."""

    last = "last"  # the head's outputs for the last token
    mean = "mean"  # the mean of all hidden states
    cls = "cls"  # the first token's hidden state


@dataclass(frozen=True)
class PlacedPrefix:
    """Virtual tokens that stand before a prompt's first token: they are in the cache, and in no list or count of tokens."""

    num_tokens: int
    first_position: int
    """Position of the prompt's first token."""
    digest: str
    """sha256 of what its keys and values were made of."""
    blocks: tuple[int, ...]
    """Its blocks of the cache. Sequences share them; the last one, if not full, is copied by those that write after it."""


NO_PREFIX = PlacedPrefix(0, 0, "", ())


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it, checked by `RequestFactory.make`; or how to pool it, checked by `make_pooled`."""

    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    sink: Sink | None = None
    """Called for each new token."""
    prediction_token_ids: list[int] = field(default_factory=list)
    """What the output may be, for drafts to be copied from."""
    prefix: PlacedPrefix = NO_PREFIX
    pooling: Pooling | None = None
    """What the request gives instead of continuations."""
    adapter: AdapterId | None = None
    """The low-rank adapter that its tokens are computed with."""
    guide: Guide | None = None
    """The grammar of its outputs, at their beginning."""


@dataclass(eq=False)
class SamplingContext:
    """All that the choice of a row's next token depends on, beside its logits."""

    params: SamplingParams
    token_ids: list[int]
    """Prompt and output so far."""
    num_prompt_tokens: int
    sample: int = 0
    """Which of the request's n samples the row continues."""
    ngrams: NgramIndex | None = None
    """Index of the tokens, made when it is first asked which may not follow."""
    counts: TokenCounts | None = None
    """Counts of the tokens, made when they are first penalised."""
    guide: Guide | None = None
    """Where the output is in its grammar; None where any text may be written."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def as_sample(self, sample: int) -> "SamplingContext":
        """Return the context of another sample, which goes on from the same tokens."""
        return SamplingContext(self.params, self.token_ids, self.num_prompt_tokens, sample, guide=self.guide)


@dataclass(eq=False)  # a sequence is itself, not its contents
class Sequence(SamplingContext):
    """One continuation of a prompt on its way. The scheduler writes the counts and blocks, the engine the rest."""

    request: Request = field(kw_only=True)
    detokenizer: Detokenizer | None = None
    prompt_features: tuple[int, ...] = ()
    """Features of the prompt that the model reads in every step."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    first_output_position: int | None = None
    """Position of the first token whose output (logits and hidden state) is wanted; None: only the last token's is."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the first full blocks, as far as anybody needed them."""
    is_past_threshold: bool = False
    """Whether its keys are those of a text that is longer than the model's `long_rope_threshold`."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Its new text, in pieces."""
    stop_reason: str | int | None = None
    """The stop string, or the id of the token, that ended it."""
    unsent: str | None = None
    """Text of the last token, which the request's sink has not had yet; None where there is no such token."""
    drafting: Any = None
    """What a proposer knows of its own keys and values in the sequence's blocks, None for nothing. A fork begins with the same."""

    @classmethod
    def begin(cls, request: Request, detokenizer: Detokenizer | None = None) -> "Sequence":
        """Return a sequence that holds the prompt."""
        prompt = list(request.prompt_token_ids)
        return cls(request.params, prompt, len(prompt), request=request, detokenizer=detokenizer, guide=request.guide)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def prefix(self) -> PlacedPrefix:
        return self.request.prefix

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def fork(self) -> "Sequence":
        """Return a copy that goes its own way. Its block table names the same blocks: the scheduler counts their owners."""
        return replace(
            self,
            detokenizer=self.detokenizer and self.detokenizer.copy(),
            token_ids=list(self.token_ids),
            block_table=list(self.block_table),
            block_hashes=list(self.block_hashes),
            logprobs=list(self.logprobs),
            texts=list(self.texts),
            ngrams=self.ngrams and self.ngrams.copy(),
            counts=self.counts and self.counts.copy(),
            guide=self.guide and self.guide.copy(),
        )


@dataclass(frozen=True)
class Continuation:
    """A sequence and the token that follows it."""

    parent: Sequence
    token_id: int


class Search(Protocol):
    """How a group goes on where its sequences compete for the next tokens, or nothing follows. Tensors are Any: there is no torch here."""

    def observe(self, hidden: Any) -> None:
        """Take the hidden states [P, E] of tokens that were just computed: the prompt's, then those of the group's sequences.

        The next step overwrites them.
        """

    def advance(self, group: "SequenceGroup", logits: Any) -> list[Continuation]:
        """Return the sequences that go on, from logits [S, V] of the group's S sequences.

        At the end these are none, and the group has completions.
        """

    def restart(self, group: "SequenceGroup") -> Sequence:
        """Return the one sequence to begin with again after a preemption."""

    def recompute(self, group: "SequenceGroup") -> None:
        """Prepare for the group's sequences to be computed again from their first tokens, because their keys are other ones now."""


@dataclass(eq=False)
class SequenceGroup:
    """A request on its way. Its sequences run, wait and give way together; it is finished when none is left.

    The scheduler writes the times, in seconds of `time.monotonic`, and the preemptions.
    """

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
    pooled: Any = None
    """The vector of a request with a `pooling`."""
    error: BaseException | None = None
    """Why the request failed; then it has no sequences."""
    num_sent: Counter[int] = field(default_factory=Counter)
    """Output tokens of each sample that the sink has had."""
    queued_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float = 0.0
    num_preemptions: int = 0
    adapter_slot: int = -1
    """Where its adapter is while it runs; -1: nowhere, or it has none."""

    def __post_init__(self) -> None:
        self.sequences = [self.origin.fork()]

    @property
    def num_output_tokens(self) -> int:
        """Length of the longest output so far, without a candidate that may still be rejected."""
        candidate = 1 if self.request.params.penalty_alpha else 0
        growing = [sequence.num_output_tokens - candidate for sequence in self.sequences]
        return max(0, *growing, *(len(completion.token_ids) for completion in self.completions.values()))

    def restart(self) -> None:
        """Begin again after a preemption, where several sequences shared blocks. A single one goes on where it was."""
        if self.search:
            self.sequences = [self.search.restart(self)]
        elif self.request.params.n > 1:
            self.sequences = [self.origin.fork()]
            self.completions.clear()

    def output(self) -> "Output":
        """Return what became of a request that has finished or failed."""
        return Output(
            request_id=self.request.id,
            completions=[] if self.error else [completion for _, completion in sorted(self.completions.items())],
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens or 0,
            prompt_logprobs=self.prompt_logprobs if self.request.params.prompt_logprobs is not None else None,
            pooled=self.pooled,
            error=self.error,
            queued_s=self.queued_s,
            first_token_s=self.first_token_s,
            finished_s=self.finished_s,
            num_preemptions=self.num_preemptions,
        )


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt. `text` is None where the engine has no tokenizer."""

    token_ids: list[int]
    """New tokens, with the stop token if one ended the row."""
    text: str | None
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    score: float | None = None
    """A beam's sum of log probabilities over its length to the power of length_penalty."""
    stop_reason: str | int | None = None
    """The stop string, or the id of the eos or stop token, that ended the row; None where nothing of the kind did."""


@dataclass(frozen=True)
class Output:
    """A finished request, or one that failed. Times are seconds of `time.monotonic`; outputs that differ in these alone are equal."""

    request_id: int
    completions: list[Completion]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache spared."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log probabilities of the prompt's tokens from the second on."""
    pooled: Any = field(default=None, compare=False)
    """The vector of a request with a `pooling`: a float32 tensor [O] on the CPU, of the head's outputs or the hidden channels."""
    error: BaseException | None = None
    """Why the request failed on its way; then there are no completions. The other requests went on."""
    queued_s: float = field(default=0.0, compare=False)
    first_token_s: float | None = field(default=None, compare=False)
    """When the first tokens were chosen; None where the request failed before."""
    finished_s: float = field(default=0.0, compare=False)
    num_preemptions: int = field(default=0, compare=False)
    """How often the request gave its blocks up and was computed again."""
