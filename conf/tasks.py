"""Settings of the tasks that generate, measure, convert and keep prefixes, and of sweeps. A part of schema.py."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conf.errors import UserError, check
from conf.sizes import num_bytes


class ConvertDType(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    # llama.cpp's types (format=gguf): blocks of 32, of one scale and for _1 one minimum, and mixtures of blocks of 256
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
    none = "none"  # a prompt that is too long for the context is an error of its row
    left = "left"  # the first tokens are left out
    right = "right"  # the last tokens are left out


class OutputForm(Enum):
    predictions = "predictions"  # rows as in predictions.jsonl
    paddlenlp = "paddlenlp"  # rows of src, tgt and output, as PaddleNLP's predictor writes


class CheckpointFormat(Enum):
    hf = "hf"  # Hugging Face's: config.json and safetensors
    sharded = "sharded"  # our own: a file for each rank, and layout.json
    gguf = "gguf"  # llama.cpp's: one file with the tokenizer in it


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
    truncate: Truncation = Truncation.none
    """Where a prompt of more than `max_prompt_tokens` loses tokens. Its row gives their number as `num_truncated_tokens`."""
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt with `truncate`, those that the tokenizer puts around a text among them; null without."""
    output_file: str | None = None
    """A file that also gets the results, as JSON lines in `output_form`, when the job is done; an existing one is replaced. null: none."""
    output_form: OutputForm = OutputForm.predictions
    export: bool = False
    """Export the model first, as task=export does, to the folder `export` of the run's own, and predict with what was exported."""

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
    tasks: list[str] = field(default_factory=list)
    """Tasks of lm-evaluation-harness (extra `eval`), by name: each gives its own metrics."""
    tasks_folder: str | None = None
    """Folder with the YAML files of further tasks."""
    num_fewshot: int | None = None
    """Examples before each question of `tasks`; null: as many as the task says."""
    limit: int | None = None
    """Most questions of each of `tasks`; null: all."""
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
        for name, least in (("num_fewshot", 0), ("limit", 1)):
            value = getattr(self, name)
            check(value is None or value >= least, f"evaluate.{name}", value, f"a number from {least}, or null")
        for name in ("tasks_folder", "num_fewshot", "limit"):
            if not self.tasks and (value := getattr(self, name)) is not None:
                raise UserError(f"evaluate.{name}={value} needs a task of lm_eval: give evaluate.tasks=[NAME] too")


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
    """Dtype of the tensors that are written; auto: each one's own, in GGUF that of most. q4_0 and the like: a type of GGUF files, of most
    matrices; llama-quantize's rules say which have more bits."""
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
    """The model as its graph and its packed weights, which run without its code and its checkpoint."""

    output: str | None = None
    """Folder to make, which appears when it is complete and proved."""
    tp: int = 1
    """Ranks that compute each layer together."""
    pp: int = 1
    """Stages, each of which has some of the layers."""
    overwrite: bool = False
    """Replace the model in `output`."""

    def __post_init__(self) -> None:
        check(self.output != "", "export.output", repr(self.output), "the folder to make")
        for name in ("tp", "pp"):
            check(0 < getattr(self, name) <= 512, f"export.{name}", getattr(self, name), "a number from 1 to 512")


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
