"""Settings of the tasks predict, bench, evaluate, convert, export and prefix, and of sweeps. A part of schema.py."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conf.errors import UserError, check
from conf.support.sizes import num_bytes


class ConvertDType(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    # llama.cpp's types (format=gguf). q4_0 to q8_0 have blocks of 32 weights with one scale, and for _1 one minimum.
    # The types with _k are mixtures of types with blocks of 256.
    q4_0 = "q4_0"
    q4_1 = "q4_1"
    q5_0 = "q5_0"
    q5_1 = "q5_1"
    q8_0 = "q8_0"
    q4_k_m = "q4_k_m"
    q5_k_m = "q5_k_m"
    q6_k = "q6_k"

    @property
    def is_of_gguf(self) -> bool:
        return self.value.startswith("q")


class Truncation(Enum):
    none = "none"  # a prompt that exceeds the context is an error of its row
    left = "left"  # drop the first tokens
    right = "right"  # drop the last tokens


class OutputForm(Enum):
    predictions = "predictions"  # rows as in predictions.jsonl
    paddlenlp = "paddlenlp"  # rows of src, tgt and output, as PaddleNLP's predictor writes them


class CheckpointFormat(Enum):
    hf = "hf"  # Hugging Face: config.json and safetensors
    sharded = "sharded"  # Quintet's own: a file per rank, and layout.json
    gguf = "gguf"  # llama.cpp: one file that includes the tokenizer


@dataclass
class PredictConfig:
    data: str | None = None
    """A prompt, a file (`.txt`, `.jsonl`, `.csv`, `.json`, or `.gz` of these), or `-` for standard input."""
    batch_size: int = 16
    """Most rows that run at once, with all their beams or samples."""
    add_special_tokens: bool = True
    """Whether text prompts get special tokens of the tokenizer, such as BOS. Prompts from a chat template never do."""
    chat_template: str = "auto"
    """Template of prompts.

    auto: `messages` rows use the tokenizer's template, text prompts none; none: no template; a path: a Jinja file, for
    `messages` rows and for text prompts (as one user message).
    """
    prefix: str | None = None
    """Name of the prefix in `model.prefixes` before every prompt; null: none. A row's own `prefix` has priority."""
    adapter: str | None = None
    """Name in `model.adapters` for rows without an adapter of their own; null: none."""
    resume: str = "auto"
    """Whether to continue an unfinished job.

    auto: a job with the same input, model and decode settings, in the run's own folder or next to it; none: start
    again; a folder: the job in it, which must be the same. A job from standard input continues only in a named folder.
    """
    max_errors: int | None = None
    """Most failed rows before the job ends early; a resumed job counts from 0. null: no limit."""
    truncate: Truncation = Truncation.none
    """The side on which a prompt loses tokens beyond `max_prompt_tokens`.

    Its row returns the number as `num_truncated_tokens`.
    """
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt with `truncate`, including special tokens of the tokenizer; null without `truncate`."""
    output_file: str | None = None
    """A file that also gets the results, as JSON lines in `output_form`, when the job is done.

    An existing file is replaced. null: none.
    """
    output_form: OutputForm = OutputForm.predictions
    export: bool = False
    """Export the model first, as task=export does, and predict with the export.

    Its folder is `export` in the run's folder.
    """

    def __post_init__(self) -> None:
        check(bool(self.resume), "predict.resume", repr(self.resume), "auto, none or the folder of an unfinished job")
        check(
            self.max_errors is None or self.max_errors >= 0,
            "predict.max_errors",
            self.max_errors,
            "a number from 0, or null",
        )
        if self.prefix and self.adapter:
            both = f"predict.prefix={self.prefix} and predict.adapter={self.adapter}"
            raise UserError(f"{both} do not go together, because a prefix was made without adapters: leave one out")
        check(self.prefix != "", "predict.prefix", repr(self.prefix), "a name of model.prefixes, or null")
        check(self.output_file != "", "predict.output_file", repr(self.output_file), "the file to write, or null")
        most = self.max_prompt_tokens
        check(most is None or most > 0, "predict.max_prompt_tokens", most, "a number above 0, or null")
        if (self.truncate is Truncation.none) != (most is None):
            given, other = f"predict.truncate={self.truncate.name}", "predict.max_prompt_tokens"
            raise UserError(
                f"{given} and {other}={'null' if most is None else most} do not go together: give both, or neither"
            )
        if self.output_form is not OutputForm.predictions and self.output_file is None:
            form = f"predict.output_form={self.output_form.name}"
            raise UserError(f"{form} needs a file: give predict.output_file=FILE too, or leave it out")
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
    """A `.jsonl`, `.csv` or `.json`, or `.gz` of these.

    Its prompts, or first turns, replace random prompts of `prompt_tokens`.
    """
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
    """A file with text, for perplexity.

    A `.txt` (one text), or a `.jsonl`, `.csv` or `.json` with `text` or `prompt` in each row, or `.gz` of these.
    """
    window: int | None = None
    """Most tokens that the model sees at once; null: 512, or the context length if that is shorter."""
    stride: int | None = None
    """Tokens between the starts of two windows; null: the window, so that windows do not overlap."""
    questions: str | None = None
    """A `.jsonl`, `.csv` or `.json`, or `.gz` of these, with rows as in predict and an `answer` in each: for accuracy.
    """
    tasks: list[str] = field(default_factory=list)
    """Names of lm-evaluation-harness tasks (extra `eval`). Each returns its own metrics."""
    tasks_folder: str | None = None
    """Folder with YAML files of additional tasks."""
    num_fewshot: int | None = None
    """Examples before each question of `tasks`; null: the task's default."""
    limit: int | None = None
    """Most questions of each of `tasks`; null: all."""
    reference: str = "none"
    """Folder or hub id of the float model of a quantised model, or none.

    Gives KL divergence and agreement on `data`.
    """

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
        for name, least in (("num_fewshot", 0), ("limit", 1)):
            value = getattr(self, name)
            check(value is None or value >= least, f"evaluate.{name}", value, f"a number from {least}, or null")
        for name in ("tasks_folder", "num_fewshot", "limit"):
            if not self.tasks and (value := getattr(self, name)) is not None:
                raise UserError(f"evaluate.{name}={value} needs a task of lm_eval: give evaluate.tasks=[NAME] too")


@dataclass
class ConvertConfig:
    """Write the checkpoint of `model.path` in another layout, sharding or dtype."""

    output: str | None = None
    """Folder to create; it appears when it is complete."""
    format: CheckpointFormat = CheckpointFormat.hf
    tp: int = 1
    """Tensor parallel ranks (format=sharded)."""
    pp: int = 1
    """Pipeline parallel stages (format=sharded)."""
    dtype: ConvertDType = ConvertDType.auto
    """Dtype of the written tensors; auto: unchanged, and in GGUF the dtype of most tensors.

    A GGUF type such as q4_0 is the type of most matrices. llama-quantize's rules select the matrices with more bits.
    """
    lora: str | None = None
    """Folder of a LoRA adapter in PEFT's layout to merge into the weights."""
    max_shard_size: str = "5GB"
    """Most bytes of a weight file (format=hf): a number with B, KB, MB, GB, TB (1000s) or KiB, MiB, GiB, TiB (1024s).
    """
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
        if self.dtype.is_of_gguf and self.format is not CheckpointFormat.gguf:
            raise UserError(
                f"convert.dtype={self.dtype.name} is not used by convert.format={self.format.name}: give convert.format=gguf"
            )
        check(self.lora != "", "convert.lora", repr(self.lora), "the folder of an adapter, or null")
        if self.max_shard_size != "5GB" and self.format is not CheckpointFormat.hf:
            raise UserError(
                f"convert.max_shard_size={self.max_shard_size} is not used by convert.format={self.format.name}: "
                "leave it at 5GB, or give convert.format=hf"
            )


@dataclass
class ExportConfig:
    """The model as a graph with packed weights, which runs without the model's code and checkpoint."""

    output: str | None = None
    """Folder to create; it appears when it is complete and verified."""
    tp: int = 1
    """Tensor parallel ranks."""
    pp: int = 1
    """Pipeline parallel stages."""
    overwrite: bool = False
    """Replace the model in `output`."""

    def __post_init__(self) -> None:
        check(self.output != "", "export.output", repr(self.output), "the folder to make")
        for name in ("tp", "pp"):
            check(0 < getattr(self, name) <= 512, f"export.{name}", getattr(self, name), "a number from 1 to 512")


@dataclass
class PrefixConfig:
    """Store the KV cache of prompts in a file, for rows that have these prefixes."""

    data: str | None = None
    """A prompt, a file or `-`, with rows as in predict."""
    output: str | None = None
    """File to create; it appears when it is complete."""
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
    """Result that each job returns to an optimising sweeper, such as Optuna's; null: nothing.

    The key of a number in metrics.json, such as decode_tokens_per_s or time_to_first_token_s.p50, or a list of keys.
    """

    def __post_init__(self) -> None:
        names = self.objective if isinstance(self.objective, list) else [self.objective]
        are_names = bool(names) and all(isinstance(name, str) and name for name in names)
        allowed = "the name of a metric, a list of such, or null"
        check(self.objective is None or are_names, "sweep.objective", self.objective, allowed)
