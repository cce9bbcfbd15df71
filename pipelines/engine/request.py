"""The engine's data types: a Request on input, Sequences while it runs, an Output at the end."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, TypeAlias

from conf.speculation import Speculate, SpeculationConfig
from pipelines.engine.adapter_slots import AdapterId
from pipelines.engine.detokenizer import Detokenizer
from pipelines.engine.dry import Breakers
from pipelines.engine.guide import Guide
from pipelines.engine.ngrams import NgramIndex
from pipelines.engine.snapshots import NO_SNAPSHOTS, Snapshots
from pipelines.engine.thinking import Thinking
from pipelines.engine.token_counts import TokenCounts


class FinishReason(Enum):
    stop = "stop"  # EOS, a stop token, a stop string or the end of a guide
    length = "length"
    no_token = "no_token"  # every token was banned
    error = "error"  # the request was refused, or failed inside the engine


@dataclass(frozen=True)
class ContextLimit:
    """The maximum number of tokens of a sequence, and the name of the setting that limits it, for error messages."""

    num_tokens: int
    source: str
    num_prefix_tokens: int = 0
    """Virtual tokens of a prefix, which use up positions of the context."""

    @property
    def num_places(self) -> int:
        """Number of tokens that fit after the prefix."""
        return self.num_tokens - self.num_prefix_tokens

    def __str__(self) -> str:
        prefix_text = f", of which a prefix takes {self.num_prefix_tokens}" if self.num_prefix_tokens else ""
        return f"{self.source}={self.num_tokens}{prefix_text}"


@dataclass(frozen=True)
class SamplingParams:
    """A DecodeConfig resolved for one prompt: all limits are numbers, all stop tokens ids, and the seed is set."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    n: int
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    num_return_sequences: int
    penalty_alpha: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_breakers: Breakers
    no_repeat_ngram_size: int
    logit_bias: dict[int, float]
    bad_words: tuple[tuple[int, ...], ...]
    """Banned sequences of token ids: each word as tokenised, bad_words_ids, and each token of suppress_tokens."""
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...]
    first_token_ids: tuple[int, ...]
    """The first output token must be one of these; empty: unrestricted."""
    last_token_ids: tuple[int, ...]
    """Output token number max_new_tokens must be one of these; empty: unrestricted."""
    allowed_token_ids: list[int]
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    """The stop tokens and, unless `ignore_eos` is set, the model's EOS tokens."""
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
        """Whether tokens are drawn with the seed. Beam search and contrastive search have temperature 0."""
        return self.temperature > 0

    @property
    def num_sequences(self) -> int:
        """Maximum number of sequences that the request has at once."""
        return max(self.n, self.num_beams, self.top_k if self.penalty_alpha else 1)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities of one step, from unprocessed logits: of the chosen and the most likely tokens."""

    logprobs: dict[int, float]
    """Token id to log probability; always contains the chosen token."""
    ranks: dict[int, int]
    """Token id to rank; 1 is the most likely token."""


Sink: TypeAlias = Callable[[int, list[int], str, list[TokenLogprobs]], None]
"""Takes the sample number, its next token ids, the text that they complete (can be ""), and requested log
probabilities.

The joined texts of a sample are its completion.
"""


class Pooling(Enum):
    """Names the outputs of a prompt that become its vector."""

    last = "last"  # the head's outputs for the last token
    mean = "mean"  # the mean of all hidden states
    cls = "cls"  # the first token's hidden state


@dataclass(frozen=True)
class PlacedPrefix:
    """Virtual tokens before a prompt's first token. They are in the cache, but not in any list or count of tokens."""

    num_tokens: int
    first_position: int
    """Position of the prompt's first token."""
    digest: str
    """sha256 of the source of its keys and values."""
    blocks: tuple[int, ...]
    """Its blocks of the cache, which sequences share. A sequence that writes into the last, partly filled block copies
    it first."""


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
    """The expected output, from which drafts are copied."""
    prefix: PlacedPrefix = NO_PREFIX
    pooling: Pooling | None = None
    """How to pool the prompt into a vector; None: generate tokens."""
    adapter: AdapterId | None = None
    """The LoRA adapter that its tokens are computed with."""
    guide: Guide | None = None
    """The grammar of its outputs, in the start state."""
    thinking: Thinking | None = None
    """The limit of reasoning in its outputs, in the start state."""
    is_background: bool = False
    """Whether the request yields to all other waiting requests."""


@dataclass(eq=False)
class SamplingContext:
    """Everything except the logits that the choice of a row's next token depends on."""

    params: SamplingParams
    token_ids: list[int]
    """Prompt and output so far."""
    num_prompt_tokens: int
    sample: int = 0
    """Which of the request's n samples the row continues."""
    ngrams: NgramIndex | None = None
    """Index of n-grams, created on first use."""
    counts: TokenCounts | None = None
    """Counts of the tokens, created when they are first penalised."""
    guide: Guide | None = None
    """The output's state in its grammar; None: no guide."""
    thinking: Thinking | None = None
    """The output's reasoning so far; None: its length is not limited."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def as_sample(self, sample: int) -> "SamplingContext":
        """Return the context of another sample that continues from the same tokens."""
        return SamplingContext(
            self.params, self.token_ids, self.num_prompt_tokens, sample, guide=self.guide, thinking=self.thinking
        )


@dataclass(eq=False)  # compared by identity
class Sequence(SamplingContext):
    """One continuation of a prompt in progress. The scheduler writes the counts and blocks, the engine the rest."""

    request: Request = field(kw_only=True)
    detokenizer: Detokenizer | None = None
    prompt_features: tuple[int, ...] = ()
    """Features of the prompt that the model reads in every step."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    first_output_position: int | None = None
    """Position of the first token whose output (logits, hidden state) is needed; None: only the last token's output."""
    block_table: list[int] = field(default_factory=list)
    window_table: list[int] = field(default_factory=list)
    """Its blocks in the layers with windows, up to the last scheduled token; empty if all layers have the same blocks."""
    window_start: int = 0
    """Entries of `window_table` before this one are released."""
    state_slots: list[int] = field(default_factory=list)
    """Slots of its recurrent state: the last one is its own; a slot before it is read by the step in progress."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the first full blocks, computed on demand."""
    snapshots: Snapshots = NO_SNAPSHOTS
    last_snapshot: int = 0
    """Number of tokens before the last snapshot that it has read or saved; 0: none."""
    is_past_threshold: bool = False
    """Whether its keys are computed for a text longer than the model's `long_rope_threshold`."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Its new text, in pieces."""
    stop_reason: str | int | None = None
    """The stop string or the token id that ended the sequence."""
    unsent: str | None = None
    """Text of the last token; None after the request's sink has received it, and before the first token."""
    drafting: Any = None
    """The proposer's state for this sequence, or None. A fork starts with the same state."""

    @classmethod
    def begin(cls, request: Request, detokenizer: Detokenizer | None = None) -> "Sequence":
        prompt = list(request.prompt_token_ids)
        sequence = cls(request.params, prompt, len(prompt), request=request, detokenizer=detokenizer)
        sequence.guide, sequence.thinking = request.guide, request.thinking
        return sequence

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
        """Return an independent copy. It refers to the same blocks and state slot; the scheduler counts their owners."""
        return replace(
            self,
            detokenizer=self.detokenizer and self.detokenizer.copy(),
            token_ids=list(self.token_ids),
            block_table=list(self.block_table),
            window_table=list(self.window_table),
            state_slots=list(self.state_slots),
            block_hashes=list(self.block_hashes),
            logprobs=list(self.logprobs),
            texts=list(self.texts),
            ngrams=self.ngrams and self.ngrams.copy(),
            counts=self.counts and self.counts.copy(),
            guide=self.guide and self.guide.copy(),
        )


@dataclass(frozen=True)
class Continuation:
    """A sequence and its next token."""

    parent: Sequence
    token_id: int


class Search(Protocol):
    """How a group continues if its sequences compete for the next tokens, or if it generates none.

    Tensors are typed as Any, because this module does not import torch.
    """

    def observe(self, hidden: Any) -> None:
        """Take the hidden states [P, E] of newly computed tokens: first the prompt's, then the tokens of the group's sequences.

        The next step overwrites them.
        """

    def advance(self, group: "SequenceGroup", logits: Any) -> list[Continuation]:
        """Return the continuations, from logits [S, V] of the group's S sequences.

        At the end the list is empty and the group has completions.
        """

    def restart(self, group: "SequenceGroup") -> Sequence:
        """Return the one sequence that the group restarts with after a preemption."""

    def recompute(self, group: "SequenceGroup") -> None:
        """Prepare to compute all tokens of the group's sequences again, because the keys of all tokens change."""


@dataclass(eq=False)
class SequenceGroup:
    """A request in progress. Its sequences run, wait and are preempted together.

    The group is finished when it has no sequence. The scheduler writes the times, in seconds of `time.monotonic`, and
    the preemptions.
    """

    request: Request
    origin: Sequence
    """The prompt, in the state before any computation."""
    search: Search | None
    """None for greedy decoding and sampling, whose sequences do not compete."""
    sequences: list[Sequence] = field(default_factory=list)
    """The sequences that still grow."""
    completions: dict[int, "Completion"] = field(default_factory=dict)
    """Key: sample number, or rank in a search."""
    num_cached_tokens: int | None = None
    """Prefix cache hit of the prompt in tokens; None until the group is admitted."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: Any = None
    """The vector of a request with `pooling`."""
    error: BaseException | None = None
    """Why the request failed; then the group has no sequences."""
    num_sent: Counter[int] = field(default_factory=Counter)
    """Number of output tokens of each sample that the sink has received."""
    queued_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float = 0.0
    num_preemptions: int = 0
    adapter_slot: int = -1
    """Slot of its adapter while it runs; -1: no slot or no adapter."""

    def __post_init__(self) -> None:
        self.sequences = [self.origin.fork()]

    @property
    def num_output_tokens(self) -> int:
        """Length of the longest output so far, without a candidate that may still be rejected."""
        candidate = 1 if self.request.params.penalty_alpha else 0
        growing = [sequence.num_output_tokens - candidate for sequence in self.sequences]
        return max(0, *growing, *(len(completion.token_ids) for completion in self.completions.values()))

    def restart(self) -> None:
        """Reset a search or a group of several samples after a preemption. A single sequence keeps its tokens."""
        if self.search:
            self.sequences = [self.search.restart(self)]
        elif self.request.params.n > 1:
            self.sequences = [self.origin.fork()]
            self.completions.clear()

    def output(self) -> "Output":
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
    """One continuation of a prompt. `text` is None if the engine has no tokenizer."""

    token_ids: list[int]
    """New tokens, including the stop token if one ended the row."""
    text: str | None
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    score: float | None = None
    """Beam search: sum of log probabilities / length ** length_penalty."""
    stop_reason: str | int | None = None
    """The stop string, EOS token id or stop token id that ended the row; None if the row ended for another reason."""


@dataclass(frozen=True)
class Output:
    """The result of a finished or failed request. Times are seconds of `time.monotonic` and do not affect equality."""

    request_id: int
    completions: list[Completion]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prefix cache hit of the prompt in tokens."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log probabilities of the prompt's tokens, starting with the second token."""
    pooled: Any = field(default=None, compare=False)
    """The vector of a request with `pooling`: a float32 tensor [O] on the CPU, of the head's outputs or the hidden
    channels."""
    error: BaseException | None = None
    """Why the request failed; then there are no completions. Other requests are not affected."""
    queued_s: float = field(default=0.0, compare=False)
    first_token_s: float | None = field(default=None, compare=False)
    """When the first tokens were chosen; None if the request failed before."""
    finished_s: float = field(default=0.0, compare=False)
    num_preemptions: int = field(default=0, compare=False)
    """How often the request released its blocks and was computed again."""
