"""Every knob of a run, typed. `RunConfig` is what `run.py` composes from YAML and overrides and hands to the pipelines.

Standard library only, so that everything above may import it. Checks live in `__post_init__`; an error names the dotted key.
The classes stay mutable because Hydra merges overrides into them; after composition nobody changes them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from conf.errors import UserError


class Task(Enum):
    predict = "predict"
    bench = "bench"


class DType(Enum):
    auto = "auto"  # what the checkpoint says
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Weights(Enum):
    checkpoint = "checkpoint"
    random = "random"  # initialised from config.json alone, for benchmarks


class ParallelMode(Enum):
    single = "single"


class QuantScheme(Enum):
    none = "none"


class DeviceType(Enum):
    auto = "auto"  # cuda if there is one, else cpu
    cpu = "cpu"
    cuda = "cuda"


def _check(holds: bool, key: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{key}={value} is not allowed: give {allowed}")


def _is_memory(text: str) -> bool:
    try:
        return text == "auto" or 0 < float(text) < math.inf
    except ValueError:
        return False


@dataclass
class ModelConfig:
    """Where a model is and how to hold it. Its architecture comes from the checkpoint's config.json."""

    path: str = ""
    """Folder in Hugging Face layout, or a hub id such as `meta-llama/Llama-2-7b-hf`."""
    dtype: DType = DType.auto
    weights: Weights = Weights.checkpoint
    tokenizer: str | None = ""
    """Folder of the tokenizer; empty: the model's own; null: none, prompts are token ids."""
    max_length: int | None = None
    """Most prompt + new tokens of any sequence; null: what the checkpoint was made for."""
    allow_pickle: bool = False
    """Read `.bin`/`.pt` files too (with `weights_only=True`)."""

    def __post_init__(self) -> None:
        _check(bool(self.path), "model.path", repr(self.path), "a folder or a hub id")
        _check(
            self.max_length is None or self.max_length > 0,
            "model.max_length",
            self.max_length,
            "a number above 0, or null",
        )


@dataclass
class ParallelConfig:
    mode: ParallelMode = ParallelMode.single


@dataclass
class QuantConfig:
    scheme: QuantScheme = QuantScheme.none


@dataclass
class DeviceConfig:
    type: DeviceType = DeviceType.auto
    threads: int | None = None
    """Threads of the CPU operators; null: torch's choice."""
    max_batched_tokens: int = 2048
    """Most tokens in one step. Longer prompts are computed in chunks, beside the rows that generate."""
    block_size: int | None = None
    """Tokens in a block of the KV cache; null: 16 on a CPU, 64 on a GPU."""
    kv_cache_memory: str = "auto"
    """Bytes of the KV cache, or a fraction (below 1) of the memory that is free; auto: half of it, or what all rows need."""

    def __post_init__(self) -> None:
        _check(self.max_batched_tokens > 0, "device.max_batched_tokens", self.max_batched_tokens, "a number above 0")
        _check(
            self.block_size is None or self.block_size > 0,
            "device.block_size",
            self.block_size,
            "a number above 0, or null",
        )
        allowed = "auto, a number of bytes, or a fraction between 0 and 1"
        _check(_is_memory(self.kv_cache_memory), "device.kv_cache_memory", self.kv_cache_memory, allowed)
        _check(self.threads is None or self.threads > 0, "device.threads", self.threads, "a number above 0, or null")


@dataclass
class DecodeConfig:
    """How tokens are chosen: beams if num_beams > 1, contrastive search if penalty_alpha > 0, samples if temperature > 0, else greedy.

    Order: logit_bias, penalties, bans, temperature, top_k, top_p, min_p. Where a setting that may be null says nothing, the checkpoint's
    generation_config.json does, and else the value that changes nothing.
    """

    max_new_tokens: int | None = None
    """Most new tokens. With `max_length` too, the smaller wins; with neither, 256 or what the context leaves."""
    min_new_tokens: int | None = None
    """No stop token, eos or stop string ends a row before this many new tokens."""
    max_length: int | None = None
    """Most prompt + new tokens."""
    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0: all. In contrastive search: the number of candidates."""
    top_p: float | None = None
    """Keep the most likely tokens up to and including the one that reaches this probability."""
    min_p: float | None = None
    """Keep tokens at least this likely in proportion to the most likely one."""
    n: int = 1
    """Samples of each prompt. The prompt is computed once."""
    num_beams: int | None = None
    length_penalty: float | None = None
    """Beam scores are divided by length ** length_penalty: above 0 favours long continuations, below 0 short ones."""
    early_stopping: bool | str | None = None
    """When a search that has num_beams finished beams ends: true: at once; false: when a better one is unlikely; never: when impossible."""
    num_return_sequences: int | None = None
    """Beams that are returned, best first."""
    penalty_alpha: float | None = None
    """Contrastive search: weight of the similarity to earlier tokens against the probability (arXiv 2202.06417)."""
    repetition_penalty: float | None = None
    """Divides (if negative: multiplies) the logits of tokens seen in prompt or output (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    no_repeat_ngram_size: int | None = None
    """No sequence of so many tokens occurs twice in prompt and output; 0: no limit."""
    logit_bias: Any = None
    """Added to the logits of these token ids: {ID: BIAS, ...}."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that are never written with the tokens that the tokenizer has for them, at the start of a word or not."""
    allowed_token_ids: list[int] = field(default_factory=list)
    """The only tokens that may be chosen; empty: all."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a row; the text before them is kept. In a shell a line break is $'decode.stop=["\\n"]'."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a row, besides the model's eos."""
    include_stop: bool = False
    """Keep the stop string, or the text of the token that ended the row."""
    ignore_eos: bool = False
    seed: int | None = None
    """null: random. A seeded row gives the same tokens whatever else is in the batch."""
    logprobs: int | None = None
    """Log probabilities of this many most likely tokens, from the unmodified distribution, besides the chosen one's."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first, which nothing foretells."""
    skip_special_tokens: bool = True
    prefix_cache: bool = True
    """Take over the keys and values of a prompt's beginning from an earlier row that began the same way."""
    cache_salt: str | None = None
    """Share beginnings only with rows of the same salt, so that nobody learns from timing what others asked."""

    def __post_init__(self) -> None:
        for name, allowed, holds in _DECODE_CHECKS:
            value = getattr(self, name)
            _check(value is None or holds(value), f"decode.{name}", value, allowed)
        if self.max_new_tokens is not None and self.min_new_tokens is not None:
            allowed = f"at most decode.max_new_tokens={self.max_new_tokens}"
            _check(self.min_new_tokens <= self.max_new_tokens, "decode.min_new_tokens", self.min_new_tokens, allowed)
        if (self.num_beams or 1) > 1:
            self._check_search("num_beams", self.num_beams)
            allowed = f"at most decode.num_beams={self.num_beams}"
            _check(
                (self.num_return_sequences or 1) <= (self.num_beams or 1),
                "decode.num_return_sequences",
                self.num_return_sequences,
                allowed,
            )
            _check(
                not self.penalty_alpha,
                "decode.penalty_alpha",
                self.penalty_alpha,
                "0 with beams: contrastive search has none",
            )
            _check(self.logprobs is None, "decode.logprobs", self.logprobs, "null with beams")
        elif self.penalty_alpha:
            self._check_search("penalty_alpha", self.penalty_alpha)
            if self.top_k is not None:
                allowed = f"2 to {MAX_SEQUENCES} candidates for contrastive search"
                _check(2 <= self.top_k <= MAX_SEQUENCES, "decode.top_k", self.top_k, allowed)
        elif self.num_beams is not None:
            allowed = "1 without beams: give decode.num_beams, or decode.n for samples"
            _check(
                (self.num_return_sequences or 1) == 1, "decode.num_return_sequences", self.num_return_sequences, allowed
            )
        if self.n > 1 and self.temperature is not None:
            _check(
                self.temperature > 0,
                "decode.n",
                self.n,
                "1 with decode.temperature=0, which gives the same text every time",
            )

    def _check_search(self, name: str, value: object) -> None:
        allowed = f"0 with decode.{name}={value}, which does not sample"
        _check(not self.temperature, "decode.temperature", self.temperature, allowed)
        _check(self.n == 1, "decode.n", self.n, f"1 with decode.{name}={value}, which does not sample")

    def resolved(self, defaults: dict[str, Any]) -> "DecodeConfig":
        """A copy that says everything: where a setting is null, the default's value, else the neutral one.

        `defaults` are what a checkpoint suggests. Its lengths count only where neither length is set here.
        """
        values = {**NEUTRAL, **defaults}
        if self.max_new_tokens is not None or self.max_length is not None:
            values = {name: value for name, value in values.items() if name not in ("max_new_tokens", "max_length")}
        return replace(self, **{name: value for name, value in values.items() if getattr(self, name) is None})

    def replaced(self, values: dict[str, Any]) -> "DecodeConfig":
        """A copy with other values, as a row of a job or a call of the pipeline gives them. Raises UserError for names and types."""
        hints = get_type_hints(DecodeConfig)
        given = dict(values)
        for name, value in values.items():
            if name not in hints:
                raise UserError(f"decode.{name} does not exist: there are {', '.join(f.name for f in fields(self))}")
            if name == "stop" and isinstance(value, str):
                given[name] = value = [value]
            if name == "logit_bias" and isinstance(value, dict):  # JSON has no other keys than texts
                given[name] = value = {int(key) if str(key).isdecimal() else key: bias for key, bias in value.items()}
            if not _is_of(value, hints[name]):
                expected = getattr(hints[name], "__name__", hints[name]) if not get_args(hints[name]) else hints[name]
                raise UserError(f"decode.{name}={value!r} is not of type {expected}")
        return replace(self, **given)


def _is_bias(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_LIST
        and all(type(token) is int and token >= 0 for token in value)
        and all(_is_of(bias, float) and -100 <= bias <= 100 for bias in value.values())
    )


def _is_of(value: object, hint: Any) -> bool:
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is_of(item, get_args(hint)[0]) for item in value)
    if hint is Any:  # checked by its meaning
        return True
    if get_args(hint):  # X | None
        return any(_is_of(value, option) for option in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    if hint is float:  # a whole number will do, but not one that no float can hold
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53)
    return isinstance(value, hint)


NEUTRAL = {
    "min_new_tokens": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}
"""Values of the settings that may be null, with which they change nothing."""

MAX_SEQUENCES = 256  # of one request: samples, beams or candidates
MAX_LIST = 1024  # entries of a list in a request

_DECODE_CHECKS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("max_new_tokens", "a number above 0, or null", lambda v: v > 0),
    ("min_new_tokens", "a number from 0", lambda v: v >= 0),
    ("max_length", "a number above 0, or null", lambda v: v > 0),
    ("temperature", "a finite number from 0 (0 is greedy)", lambda v: 0 <= v < math.inf),
    ("top_k", "a number from 0 (0 keeps all tokens)", lambda v: 0 <= v < 2**31),
    ("top_p", "a number above 0 and up to 1", lambda v: 0 < v <= 1),
    ("min_p", "a number from 0 to 1", lambda v: 0 <= v <= 1),
    ("n", f"a number from 1 to {MAX_SEQUENCES}", lambda v: 1 <= v <= MAX_SEQUENCES),
    ("num_beams", f"a number from 1 to {MAX_SEQUENCES}", lambda v: 1 <= v <= MAX_SEQUENCES),
    ("length_penalty", "a number from -10 to 10", lambda v: -10 <= v <= 10),
    ("early_stopping", "true, false or never", lambda v: v in (True, False, "never")),
    ("num_return_sequences", f"a number from 1 to {MAX_SEQUENCES}", lambda v: 1 <= v <= MAX_SEQUENCES),
    ("penalty_alpha", "a number from 0 to 1", lambda v: 0 <= v <= 1),
    ("repetition_penalty", "a number from 0.01 to 100", lambda v: 0.01 <= v <= 100),
    ("presence_penalty", "a number from -2 to 2", lambda v: -2 <= v <= 2),
    ("frequency_penalty", "a number from -2 to 2", lambda v: -2 <= v <= 2),
    ("no_repeat_ngram_size", "a number from 0 (0: no limit)", lambda v: v >= 0),
    ("logit_bias", f"at most {MAX_LIST} numbers from -100 to 100 by token id: {{ID: BIAS}}", _is_bias),
    (
        "bad_words",
        f"at most {MAX_LIST} texts that are not empty",
        lambda v: len(v) <= MAX_LIST and all(w.strip() for w in v),
    ),
    ("allowed_token_ids", "ids from 0", lambda v: all(id >= 0 for id in v)),
    ("stop", "texts that are not empty", lambda v: "" not in v),
    ("stop_token_ids", "ids from 0", lambda v: all(id >= 0 for id in v)),
    ("seed", "a number from 0 to 2**64 - 1, or null", lambda v: 0 <= v < 2**64),
    ("logprobs", "a number from 0 to 100, or null", lambda v: 0 <= v <= 100),
    ("prompt_logprobs", "a number from 0 to 100, or null", lambda v: 0 <= v <= 100),
)


@dataclass
class PredictConfig:
    data: str | None = None
    """A prompt, a `.txt`, a `.jsonl`, or `-` for standard input."""
    batch_size: int = 16
    """Most sequences running at once."""
    add_special_tokens: bool = True
    """Whether text prompts get the tokenizer's BOS and the like; prompts from a chat template never do."""
    chat_template: str = "auto"
    """auto: `messages` rows use the tokenizer's template, text prompts none; none: no template at all;
    a path: a Jinja file, used for `messages` rows and for text prompts (as one user message)."""
    resume: str = "auto"
    """auto: go on with an unfinished job of the same input, model and decode settings, in the run's own folder or beside it;
    none: begin anew; a folder: go on with the job in it, which must be the same. From standard input only in a folder named."""
    max_errors: int | None = None
    """Most rows that may fail before the job ends early, counted anew when it is resumed; null: any number."""

    def __post_init__(self) -> None:
        _check(bool(self.resume), "predict.resume", repr(self.resume), "auto, none or the folder of an unfinished job")
        _check(
            self.max_errors is None or self.max_errors >= 0,
            "predict.max_errors",
            self.max_errors,
            "a number from 0, or null",
        )
        _check(self.batch_size > 0, "predict.batch_size", self.batch_size, "a number above 0")
        _check(
            bool(self.chat_template),
            "predict.chat_template",
            repr(self.chat_template),
            "auto, none or the path of a Jinja file",
        )


@dataclass
class BenchConfig:
    """A batch of random prompts, of exact lengths, or of a file's."""

    data: str | None = None
    """A `.jsonl` whose prompts, or first turns, are replayed instead of random ones of `prompt_tokens`."""
    prompt_tokens: int = 512
    new_tokens: int = 64
    batch_size: int = 1
    repeats: int = 3
    warmup: int = 1

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens", "batch_size", "repeats"):
            _check(getattr(self, name) > 0, f"bench.{name}", getattr(self, name), "a number above 0")
        _check(self.warmup >= 0, "bench.warmup", self.warmup, "a number from 0")


@dataclass
class RunConfig:
    task: Task = Task.predict
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="?"))
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)

    def __post_init__(self) -> None:
        """A task has a section of its own name; what is set in another task's section nobody would read."""
        for other in [task for task in Task if task is not self.task]:
            section = getattr(self, other.name)
            unchanged = type(section)()
            for name, value in vars(section).items():
                default = getattr(unchanged, name)
                if value != default:
                    raise UserError(
                        f"{other.name}.{name}={value} is not used by task={self.task.name}: "
                        f"leave it at {'null' if default is None else default}, or give task={other.name}"
                    )
