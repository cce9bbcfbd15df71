"""Every knob of a run, typed. `RunConfig` is what `run.py` composes from YAML and overrides and hands to the pipelines.

This file imports the standard library alone, so that everything may import it. Checks are in `__post_init__`; errors name the dotted key.
The classes are mutable because Hydra merges overrides into them. After composition nobody changes them.
"""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conf.adapters import check_adapters, check_paths
from conf.decoding import DecodeConfig
from conf.errors import UserError, check
from conf.pooling import EmbedConfig, ScoreConfig
from conf.quantization import CalibrateConfig, QuantConfig, QuantizeConfig


class Task(Enum):
    predict = "predict"
    bench = "bench"
    evaluate = "evaluate"
    convert = "convert"
    quantize = "quantize"
    prefix = "prefix"
    embed = "embed"
    score = "score"

    @property
    def reads_rows(self) -> bool:
        """Whether it reads the rows of `predict.data`, by the settings of `predict`."""
        return self in (Task.predict, Task.embed, Task.score)


class DType(Enum):
    auto = "auto"  # what the checkpoint says
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ConvertDType(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    q8_0 = "q8_0"  # 8 bits in groups of 32 (format=gguf)


class Weights(Enum):
    checkpoint = "checkpoint"
    random = "random"  # initialised from config.json alone, for benchmarks


class CheckpointFormat(Enum):
    hf = "hf"  # Hugging Face's: config.json and safetensors
    sharded = "sharded"  # our own: a file for each rank, and layout.json
    gguf = "gguf"  # llama.cpp's: one file with the tokenizer in it


class ParallelMode(Enum):
    single = "single"


class DeviceType(Enum):
    auto = "auto"  # cuda if there is one, else cpu
    cpu = "cpu"
    cuda = "cuda"


def typed(value: object) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, Enum):
        return value.name
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


SIZE = re.compile(r"(\d{0,18}\.?\d{1,18}) ?([KMGT]?)(i?)(B?)", re.IGNORECASE)


def num_bytes(text: str, whole: int = 0) -> int:
    """Return the bytes of a size: 500MB (1000s), 2GiB (1024s), 4096, or below 1 a fraction of `whole`. Returns 0 for anything else."""
    match = SIZE.fullmatch(text)
    if match is None:
        return 0
    number, (unit, binary, byte) = float(match[1]), match.groups()[1:]
    if number < 1 and not unit + byte:
        return int(number * whole)
    return int(number * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


@dataclass
class ModelConfig:
    """The checkpoint, and how to load it. Its architecture comes from its own config.json."""

    path: str = ""
    """Folder in any layout of models/README.md, GGUF file, or hub id such as `meta-llama/Llama-2-7b-hf`."""
    dtype: DType = DType.auto
    weights: Weights = Weights.checkpoint
    tokenizer: str | None = ""
    """Folder of the tokenizer; empty: the model's own; null: none, prompts are token ids."""
    max_length: int | None = None
    """Most prompt + new tokens of a sequence; null: the checkpoint's context length."""
    allow_pickle: bool = False
    """Read `.bin`, `.pt` and `.pth` files too (with `weights_only=True`)."""
    verify: bool = False
    """Compare every file with the folder's manifest.json before loading."""
    prefixes: Any = None
    """Soft prefixes by the names that rows give, {NAME: PATH, ...}: a pre_caches.npy of PaddleNLP or a folder with one, or the folder of a
    PEFT adapter of prefix_tuning, prompt_tuning or p_tuning."""
    keep_packed: bool = False
    """Keep the model as the CPU kernels read it in outputs/packed, as large as in memory, and map that file at the next start."""
    adapters: Any = None
    """LoRA adapters in PEFT's layout that rows may name, beside the weights: {NAME: FOLDER, ...}."""
    max_adapters: int = 8
    """Most adapters that the rows of a step may have. The least recently used one makes room for another."""

    def __post_init__(self) -> None:
        check(bool(self.path), "model.path", repr(self.path), "a folder or a hub id")
        check_paths("model.prefixes", self.prefixes)
        check_paths("model.adapters", self.adapters)
        check(self.max_adapters > 0, "model.max_adapters", self.max_adapters, "a number above 0")
        random = self.weights is Weights.random
        check(not (self.verify and random), "model.verify", "true", "false, or model.weights=checkpoint")
        check(not (self.keep_packed and random), "model.keep_packed", "true", "false, or model.weights=checkpoint")
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
class DeviceConfig:
    type: DeviceType = DeviceType.auto
    threads: int | None = None
    """Threads of the CPU operators; null: one for each physical core that the process may use."""
    decode_threads: int | None = None
    """Threads of decode steps, which are limited by memory: fewer cores may use all its bandwidth. null: all threads."""
    max_batched_tokens: int = 2048
    """Most tokens of a step. Longer prompts are computed in chunks, beside the rows that generate."""
    block_size: int | None = None
    """Tokens in a block of the KV cache; null: 16 on a CPU, 64 on a GPU."""
    kept_prefixes: list[str] = field(default_factory=list)
    """Files of task=prefix, whose prompts are in the KV cache from the start: rows that begin with them need not compute them."""
    kv_cache_memory: str = "auto"
    """Size of the KV cache, such as 1GB, 512MiB or 4096 (bytes), or a fraction below 1 of the memory that is free beside the weights.
    auto: half of that, or what all rows need if that is less. On a GPU `memory_fraction` limits what is free."""
    memory_fraction: float = 0.9
    """Share of a GPU's memory that the process may take: weights, KV cache, CUDA graphs and the tensors of a step."""
    cuda_graphs: bool = True
    """On a GPU, capture decode steps of up to `batch_size` rows when the model is loaded, and replay them."""

    def __post_init__(self) -> None:
        check(self.max_batched_tokens > 0, "device.max_batched_tokens", self.max_batched_tokens, "a number above 0")
        check(
            self.block_size is None or self.block_size > 0,
            "device.block_size",
            self.block_size,
            "a number above 0, or null",
        )
        for path in self.kept_prefixes:
            check(bool(path), "device.kept_prefixes", self.kept_prefixes, "files that task=prefix has made")
        memory = self.kv_cache_memory
        allowed = "auto, a size such as 1GB, 512MiB or 4096, or a fraction between 0 and 1"
        check(memory == "auto" or num_bytes(memory, whole=2**60) > 0, "device.kv_cache_memory", memory, allowed)
        fraction = self.memory_fraction
        check(0 < fraction <= 1, "device.memory_fraction", fraction, "a number above 0 and up to 1")
        for name in ("threads", "decode_threads"):
            number = getattr(self, name)
            check(number is None or number > 0, f"device.{name}", number, "a number above 0, or null")


@dataclass
class PredictConfig:
    data: str | None = None
    """A prompt, a file (`.txt`, `.jsonl`, `.csv`, `.json`, or `.gz` of these), or `-` for standard input."""
    batch_size: int = 16
    """Most rows running at once, with all their beams or samples."""
    add_special_tokens: bool = True
    """Whether text prompts get the tokenizer's BOS and the like; prompts from a chat template never do."""
    chat_template: str = "auto"
    """auto: `messages` rows use the tokenizer's template, text prompts none; none: no template at all;
    a path: a Jinja file, used for `messages` rows and for text prompts (as one user message)."""
    prefix: str | None = None
    """Name of the prefix in `model.prefixes` that stands before every prompt; a row's own `prefix` beats it. null: none."""
    adapter: str | None = None
    """Which of `model.adapters` the rows have that name none; null: none."""
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
        check(self.prefix != "", "predict.prefix", repr(self.prefix), "a name of model.prefixes, or null")
        check(self.batch_size > 0, "predict.batch_size", self.batch_size, "a number above 0")
        check(
            bool(self.chat_template),
            "predict.chat_template",
            repr(self.chat_template),
            "auto, none or the path of a Jinja file",
        )


@dataclass
class BenchConfig:
    """A batch of random prompts of exact lengths, or the prompts of a file."""

    data: str | None = None
    """A `.jsonl`, `.csv` or `.json`, or `.gz` of these. Its prompts, or first turns, replace the random ones of `prompt_tokens`."""
    prompt_tokens: int = 512
    new_tokens: int = 64
    batch_size: int = 1
    repeats: int = 3
    warmup: int = 1

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens", "batch_size", "repeats"):
            check(getattr(self, name) > 0, f"bench.{name}", getattr(self, name), "a number above 0")
        check(self.warmup >= 0, "bench.warmup", self.warmup, "a number from 0")
        if self.data is not None and self.prompt_tokens != BenchConfig.prompt_tokens:
            remedy = "whose prompts have their own lengths: leave it out"
            raise UserError(f"bench.prompt_tokens={self.prompt_tokens} is not used with bench.data, {remedy}")


@dataclass
class EvaluateConfig:
    """The data that a model is measured on: a text, questions, or both."""

    data: str | None = None
    """A `.txt`, one text, or a `.jsonl`, `.csv` or `.json` with `text` or `prompt` in each row, or `.gz` of these: gives perplexity."""
    window: int | None = None
    """Most tokens that the model sees at once; null: 512, or the context where that is shorter."""
    stride: int | None = None
    """Tokens between the beginnings of two windows; null: the window, so that windows do not overlap."""
    questions: str | None = None
    """A `.jsonl`, `.csv` or `.json`, or `.gz` of these, with rows as in predict and an `answer` in each: gives the accuracy."""
    reference: str = "none"
    """Folder or hub id of the float model that this one was made of: gives KL divergence and agreement on `data`. none: neither."""

    def __post_init__(self) -> None:
        for name, least in (("window", 2), ("stride", 1)):
            value = getattr(self, name)
            check(value is None or value >= least, f"evaluate.{name}", value, f"a number from {least}, or null")
        if self.window and self.stride:
            limit = f"at most evaluate.window={self.window}, so that no token is left out"
            check(self.stride <= self.window, "evaluate.stride", self.stride, limit)
        check(bool(self.reference), "evaluate.reference", repr(self.reference), "a folder, a hub id or none")
        for name, unset in (("window", None), ("stride", None), ("reference", "none")):
            if self.data is None and (value := getattr(self, name)) != unset:
                raise UserError(f"evaluate.{name}={value} needs a text: give evaluate.data=FILE too")


@dataclass
class ConvertConfig:
    """The checkpoint of `model.path`, written in another layout, division or dtype."""

    output: str | None = None
    """Folder to make, which appears when it is complete."""
    format: CheckpointFormat = CheckpointFormat.hf
    tp: int = 1
    """Ranks that share every matrix (format=sharded)."""
    pp: int = 1
    """Stages that share the layers (format=sharded)."""
    dtype: ConvertDType = ConvertDType.auto
    """Dtype of the tensors that are written; auto: each one's own, in GGUF that of most."""
    lora: str | None = None
    """Folder of a LoRA adapter in PEFT's layout to merge into the weights."""
    max_shard_size: str = "5GB"
    """Most bytes of a weight file (format=hf): a number with B, KB, MB, GB, TB (1000s) or KiB, MiB, GiB, TiB (1024s)."""
    overwrite: bool = False
    """Replace the model in `output`."""

    @property
    def max_shard_bytes(self) -> int:
        return num_bytes(self.max_shard_size)

    def __post_init__(self) -> None:
        check(self.output != "", "convert.output", repr(self.output), "the folder to make")
        for name in ("tp", "pp"):
            value = getattr(self, name)
            check(value > 0, f"convert.{name}", value, "a number above 0")
            if value > 1 and self.format is not CheckpointFormat.sharded:
                raise UserError(
                    f"convert.{name}={value} is not used by convert.format={self.format.name}: leave it at 1, or give format=sharded"
                )
        check(
            self.max_shard_bytes > 0, "convert.max_shard_size", self.max_shard_size, "a size such as 500MB, 5GB or 2GiB"
        )
        if self.dtype is ConvertDType.q8_0 and self.format is not CheckpointFormat.gguf:
            raise UserError(
                f"convert.dtype=q8_0 is not used by convert.format={self.format.name}: give convert.format=gguf"
            )
        check(self.lora != "", "convert.lora", repr(self.lora), "the folder of an adapter, or null")
        if self.max_shard_size != "5GB" and self.format is not CheckpointFormat.hf:
            raise UserError(
                f"convert.max_shard_size={self.max_shard_size} is not used by convert.format={self.format.name}: "
                "leave it at 5GB, or give convert.format=hf"
            )


@dataclass
class PrefixConfig:
    """Prompts whose keys and values are kept in a file, for rows that begin with them."""

    data: str | None = None
    """A prompt, a file or `-`, with rows as in predict."""
    output: str | None = None
    """File to make, which appears when it is complete."""
    add_special_tokens: bool = True
    """As in predict."""
    chat_template: str = "auto"
    """As in predict."""

    def __post_init__(self) -> None:
        check(self.output != "", "prefix.output", repr(self.output), "the file to make")
        allowed = "auto, none or the path of a Jinja file"
        check(bool(self.chat_template), "prefix.chat_template", repr(self.chat_template), allowed)


@dataclass
class SweepConfig:
    """Settings of a sweep (-m)."""

    objective: Any = None
    """What each job hands to a sweeper that searches, such as Optuna's: the key of a number in its metrics.json, as
    decode_tokens_per_s or time_to_first_token_s.p50, or a list of such; null: nothing."""

    def __post_init__(self) -> None:
        names = self.objective if isinstance(self.objective, list) else [self.objective]
        are_names = bool(names) and all(isinstance(name, str) and name for name in names)
        allowed = "the name of a metric, a list of such, or null"
        check(self.objective is None or are_names, "sweep.objective", self.objective, allowed)


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
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    convert: ConvertConfig = field(default_factory=ConvertConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        """Raises UserError for settings that this task does not read: those of other tasks' sections, and of calibration."""
        calibrates = self.task is Task.quantize or self.quant.needs_calibration
        if not calibrates and self.calibrate != CalibrateConfig():
            scheme = f"quant={self.quant.scheme.name} with task={self.task.name}"
            raise UserError(f"calibrate is not used by {scheme}: leave it out, or give task=quantize")
        if self.model.prefixes and not (self.task.reads_rows or self.task is Task.prefix):
            raise UserError(f"model.prefixes is not used by task={self.task.name}: leave it out, or give task=predict")
        if self.device.kept_prefixes and not (self.task.reads_rows and self.decode.prefix_cache):
            user = "decode.prefix_cache=false" if self.task.reads_rows else f"task={self.task.name}"
            raise UserError(f"device.kept_prefixes is not used by {user}: leave one of them out")
        check_adapters(self.model.adapters or {}, self.predict.adapter, self.task.name)
        for other in [task for task in Task if task is not self.task]:
            section = getattr(self, other.name)
            unchanged = type(section)()
            for name, value in vars(section).items():
                default = getattr(unchanged, name)
                is_read = calibrates and (other, name) == (Task.quantize, "format")
                is_read |= other is Task.predict and self.task.reads_rows
                if value != default and not is_read:
                    raise UserError(
                        f"{other.name}.{name}={typed(value)} is not used by task={self.task.name}: "
                        f"leave it at {typed(default)}, or give task={other.name}"
                    )
