"""Every knob of a run, typed. `RunConfig` is what `run.py` composes from YAML and overrides and hands to the pipelines.

Standard library only, so that everything above may import it. Checks live in `__post_init__`; an error names the dotted key.
The classes stay mutable because Hydra merges overrides into them; after composition nobody changes them.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from conf.decoding import DecodeConfig
from conf.errors import UserError, check


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


class KVCacheFormat(Enum):
    none = "none"  # model.dtype
    int8 = "int8"
    fp8 = "fp8"  # e4m3
    int4 = "int4"


class DeviceType(Enum):
    auto = "auto"  # cuda if there is one, else cpu
    cpu = "cpu"
    cuda = "cuda"


def _is_memory(text: str) -> bool:
    try:
        return text == "auto" or 0 < float(text) < math.inf
    except ValueError:
        return False


@dataclass
class ModelConfig:
    """Where a model is and how to hold it. Its architecture comes from the checkpoint's config.json."""

    path: str = ""
    """Folder in Hugging Face's layout or Meta's own, or a hub id such as `meta-llama/Llama-2-7b-hf`."""
    dtype: DType = DType.auto
    weights: Weights = Weights.checkpoint
    tokenizer: str | None = ""
    """Folder of the tokenizer; empty: the model's own; null: none, prompts are token ids."""
    max_length: int | None = None
    """Most prompt + new tokens of any sequence; null: what the checkpoint was made for."""
    allow_pickle: bool = False
    """Read `.bin`, `.pt` and `.pth` files too (with `weights_only=True`)."""

    def __post_init__(self) -> None:
        check(bool(self.path), "model.path", repr(self.path), "a folder or a hub id")
        check(
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
    kv_cache: KVCacheFormat = KVCacheFormat.none
    """How keys and values are kept; the quantised ones with scales of each token and head. Goes with every scheme."""


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
        check(self.max_batched_tokens > 0, "device.max_batched_tokens", self.max_batched_tokens, "a number above 0")
        check(
            self.block_size is None or self.block_size > 0,
            "device.block_size",
            self.block_size,
            "a number above 0, or null",
        )
        allowed = "auto, a number of bytes, or a fraction between 0 and 1"
        check(_is_memory(self.kv_cache_memory), "device.kv_cache_memory", self.kv_cache_memory, allowed)
        check(self.threads is None or self.threads > 0, "device.threads", self.threads, "a number above 0, or null")


@dataclass
class PredictConfig:
    data: str | None = None
    """A prompt, a `.txt`, a `.jsonl`, or `-` for standard input."""
    batch_size: int = 16
    """Most rows running at once, with all their beams or samples."""
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
        check(bool(self.resume), "predict.resume", repr(self.resume), "auto, none or the folder of an unfinished job")
        check(
            self.max_errors is None or self.max_errors >= 0,
            "predict.max_errors",
            self.max_errors,
            "a number from 0, or null",
        )
        check(self.batch_size > 0, "predict.batch_size", self.batch_size, "a number above 0")
        check(
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
            check(getattr(self, name) > 0, f"bench.{name}", getattr(self, name), "a number above 0")
        check(self.warmup >= 0, "bench.warmup", self.warmup, "a number from 0")


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
