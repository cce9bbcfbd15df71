"""Every knob of a run, typed. `RunConfig` is what `run.py` composes from YAML and overrides and hands to the pipelines.

Standard library only, so that everything above may import it. Checks live in `__post_init__`; an error names the dotted key.
The classes stay mutable because Hydra merges overrides into them; after composition nobody changes them.
"""

import math
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
    """How tokens are chosen. Order: penalties, temperature, top_k, top_p, min_p."""

    max_new_tokens: int | None = None
    """Most new tokens. With `max_length` too, the smaller wins; with neither, 256 or what the context leaves."""
    min_new_tokens: int = 0
    """No stop token, eos or stop string ends a row before this many new tokens."""
    max_length: int | None = None
    """Most prompt + new tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the most likely tokens up to and including the one that reaches this probability."""
    min_p: float = 0.0
    """Keep tokens at least this likely in proportion to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides (if negative: multiplies) the logits of tokens seen in prompt or output (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a row; the text before them is kept. In a shell a line break is $'decode.stop=["\\n"]'."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a row, besides the model's eos."""
    ignore_eos: bool = False
    seed: int | None = None
    """null: random. A seeded row gives the same tokens whatever else is in the batch."""
    logprobs: int | None = None
    """Log probabilities of this many most likely tokens, from the unmodified distribution, besides the chosen one's."""
    skip_special_tokens: bool = True
    prefix_cache: bool = True
    """Take over the keys and values of a prompt's beginning from an earlier row that began the same way."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_length"):
            value = getattr(self, name)
            _check(value is None or value > 0, f"decode.{name}", value, "a number above 0, or null")
        _check(self.min_new_tokens >= 0, "decode.min_new_tokens", self.min_new_tokens, "a number from 0")
        if self.max_new_tokens is not None:
            allowed = f"at most decode.max_new_tokens={self.max_new_tokens}"
            _check(self.min_new_tokens <= self.max_new_tokens, "decode.min_new_tokens", self.min_new_tokens, allowed)
        _check(
            0 <= self.temperature < math.inf,
            "decode.temperature",
            self.temperature,
            "a finite number from 0 (0 is greedy)",
        )
        _check(0 <= self.top_k < 2**31, "decode.top_k", self.top_k, "a number from 0 (0 keeps all tokens)")
        _check(0 < self.top_p <= 1, "decode.top_p", self.top_p, "a number above 0 and up to 1")
        _check(0 <= self.min_p <= 1, "decode.min_p", self.min_p, "a number from 0 to 1")
        _check(
            0.01 <= self.repetition_penalty <= 100,
            "decode.repetition_penalty",
            self.repetition_penalty,
            "a number from 0.01 to 100",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(-2 <= value <= 2, f"decode.{name}", value, "a number from -2 to 2")
        _check("" not in self.stop, "decode.stop", self.stop, "texts that are not empty")
        _check(
            all(token >= 0 for token in self.stop_token_ids), "decode.stop_token_ids", self.stop_token_ids, "ids from 0"
        )
        _check(
            self.logprobs is None or 0 <= self.logprobs <= 100,
            "decode.logprobs",
            self.logprobs,
            "a number from 0 to 100, or null",
        )
        _check(
            self.seed is None or 0 <= self.seed < 2**64,
            "decode.seed",
            self.seed,
            "a number from 0 to 2**64 - 1, or null",
        )

    def replaced(self, values: dict[str, Any]) -> "DecodeConfig":
        """A copy with other values, as a row of a job or a call of the pipeline gives them. Raises UserError for names and types."""
        hints = get_type_hints(DecodeConfig)
        given = dict(values)
        for name, value in values.items():
            if name not in hints:
                raise UserError(f"decode.{name} does not exist: there are {', '.join(f.name for f in fields(self))}")
            if name == "stop" and isinstance(value, str):
                given[name] = [value]
            elif not _is_of(value, hints[name]):
                expected = getattr(hints[name], "__name__", hints[name]) if not get_args(hints[name]) else hints[name]
                raise UserError(f"decode.{name}={value!r} is not of type {expected}")
        return replace(self, **given)


def _is_of(value: object, hint: Any) -> bool:
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is_of(item, get_args(hint)[0]) for item in value)
    if get_args(hint):  # X | None
        return any(_is_of(value, option) for option in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    if hint is float:  # a whole number will do, but not one that no float can hold
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53)
    return isinstance(value, hint)


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

    def __post_init__(self) -> None:
        _check(self.batch_size > 0, "predict.batch_size", self.batch_size, "a number above 0")
        _check(
            bool(self.chat_template),
            "predict.chat_template",
            repr(self.chat_template),
            "auto, none or the path of a Jinja file",
        )


@dataclass
class BenchConfig:
    """A batch of random prompts, of exact lengths."""

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
