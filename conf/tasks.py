"""Settings of the tasks predict, bench, evaluate, convert, export, prefix and verify, and of sweeps. A part of schema.py."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conf.constraints import check_fields, is_set, one_of, option
from conf.errors import ErrorCode, UserError, check
from conf.selection import parse_selection
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
    q3_k_m = "q3_k_m"
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


TEMPLATE = (bool, "auto, none or the path of a Jinja file")
FOLDER = (bool, "the folder to make")


@dataclass
class PredictConfig:
    data: str | None = None
    """A prompt, a file (`.txt`, `.jsonl`, `.csv`, `.json`, or `.gz` of these), or `-` for standard input."""
    batch_size: int = option(16, minimum=1)
    """Most rows that run at once, with all their beams or samples."""
    add_special_tokens: bool = True
    """Whether text prompts get special tokens of the tokenizer, such as BOS. Prompts from a chat template never do."""
    chat_template: str = option("auto", form=TEMPLATE)
    """Template of prompts.

    auto: `messages` rows use the tokenizer's template, text prompts none; none: no template; a path: a Jinja file, for
    `messages` rows and for text prompts (as one user message).
    """
    prefix: str | None = option(
        None,
        form=(bool, "a name of model.prefixes, or null"),
        not_with={"adapter": is_set(reason="because a prefix is made without adapters")},
    )
    """Name of the prefix in `model.prefixes` before every prompt; null: none. A row's own `prefix` has priority."""
    adapter: str | None = None
    """Name in `model.adapters` for rows without an adapter of their own; null: none."""
    resume: str = option("auto", form=(bool, "auto, none or the folder of an unfinished job"))
    """Whether to continue an unfinished job.

    auto: a job with the same input, model and decode settings, in the run's own folder or next to it; none: start
    again; a folder: the job in it, which must be the same. A job from standard input continues only in a named folder.
    """
    max_errors: int | None = option(None, minimum=0)
    """Most failed rows before the job ends early; a resumed job counts from 0. null: no limit."""
    truncate: Truncation = option(Truncation.none, only_with={"max_prompt_tokens": is_set(give="NUMBER")})
    """The side on which a prompt loses tokens beyond `max_prompt_tokens`.

    Its row returns the number as `num_truncated_tokens`.
    """
    max_prompt_tokens: int | None = option(
        None, minimum=1, only_with={"truncate": one_of(Truncation.left, Truncation.right)}
    )
    """Most tokens of a prompt with `truncate`, including special tokens of the tokenizer; null without `truncate`."""
    output_file: str | None = option(None, form=(bool, "the file to write, or null"))
    """A file that also gets the results, as JSON lines in `output_form`, when the job is done.

    An existing file is replaced. null: none.
    """
    output_form: OutputForm = option(OutputForm.predictions, only_with={"output_file": is_set(give="FILE")})
    export: bool = False
    """Export the model first, as task=export does, and predict with the export.

    Its folder is `export` in the run's folder.
    """

    def __post_init__(self) -> None:
        check_fields(self, "predict")


@dataclass
class BenchConfig:
    """A batch of random prompts of exact lengths, or the prompts of a file."""

    data: str | None = None
    """A `.jsonl`, `.csv` or `.json`, or `.gz` of these.

    Its prompts, or first turns, replace random prompts of `prompt_tokens`.
    """
    prompt_tokens: int = option(
        512, minimum=1, not_with={"data": is_set(reason="whose prompts have their own lengths")}
    )
    new_tokens: int = option(64, minimum=1)
    batch_size: int = option(1, minimum=1)
    repeats: int = option(3, minimum=1)
    warmup: int = option(1, minimum=0)

    def __post_init__(self) -> None:
        check_fields(self, "bench")


WITH_TEXT = {"data": is_set(give="FILE")}
WITH_TASKS = {"tasks": is_set(give="[NAME]")}


GATES = {"accuracy": ("questions", "against"), "perplexity_ratio": ("data", "against"), "kl_mean": ("reference",)}
"""Metrics of evaluate.gate, and the settings of evaluate that each needs."""
GATE_FORM = "null, or bounds such as {accuracy: -0.01, perplexity_ratio: 1.02, kl_mean: 0.01}, all or some"


def _is_gate(gate: Any) -> bool:
    if not isinstance(gate, dict) or not gate or not gate.keys() <= GATES.keys():
        return False
    return all(type(bound) in (int, float) and math.isfinite(bound) for bound in gate.values())


@dataclass
class EvaluateConfig:
    """The data that a model is measured on: a text, questions, or both."""

    data: str | None = None
    """A file with text, for perplexity.

    A `.txt` (one text), or a `.jsonl`, `.csv` or `.json` with `text` or `prompt` in each row, or `.gz` of these.
    """
    window: int | None = option(None, minimum=2, only_with=WITH_TEXT)
    """Most tokens that the model sees at once; null: 512, or the context length if that is shorter."""
    stride: int | None = option(None, minimum=1, only_with=WITH_TEXT)
    """Tokens between the starts of two windows; null: the window, so that windows do not overlap."""
    questions: str | None = None
    """A `.jsonl`, `.csv` or `.json`, or `.gz` of these, with rows as in predict and an `answer` in each: for accuracy.
    """
    tasks: list[str] = field(default_factory=list)
    """Names of lm-evaluation-harness tasks (extra `eval`). Each returns its own metrics."""
    tasks_folder: str | None = option(None, only_with=WITH_TASKS)
    """Folder with YAML files of additional tasks."""
    num_fewshot: int | None = option(None, minimum=0, only_with=WITH_TASKS)
    """Examples before each question of `tasks`; null: the task's default."""
    limit: int | None = option(None, minimum=1, only_with=WITH_TASKS)
    """Most questions of each of `tasks`; null: all."""
    reference: str = option("none", form=(bool, "a folder, a hub id or none"), only_with=WITH_TEXT)
    """Folder or hub id (`org/name@REVISION`) of the float model of a quantised model, or none.

    Gives KL divergence and agreement on `data`.
    """
    against: str | None = option(None, form=(bool, "the folder of an earlier task=evaluate, or null"))
    """Folder of an earlier run on the same data, to compare with sample by sample."""
    gate: Any = option(None, form=(_is_gate, GATE_FORM))  # a dict, as model.adapters
    """Bounds of the unfavourable ends of 95 % intervals, for exit code 3: {accuracy: -0.01, perplexity_ratio: 1.02}.

    accuracy: the least difference from `against`; perplexity_ratio: the largest quotient; kl_mean: the largest KL
    divergence from `reference`.
    """
    seed: int = option(0, minimum=0)
    """Seed of the draws of bootstrap intervals."""

    def __post_init__(self) -> None:
        check_fields(self, "evaluate")
        for name in self.gate or {}:
            for needed in GATES[name]:
                key = f"evaluate.gate.{name}"
                if getattr(self, needed) in (None, "none"):
                    problem = f"{key} needs evaluate.{needed}"
                    raise UserError(f"{problem}: give it, or leave the bound out", ErrorCode.needs_other, key)
        if self.window and self.stride:
            limit = f"at most evaluate.window={self.window}, so that no token is left out"
            check(self.stride <= self.window, "evaluate.stride", self.stride, limit, ErrorCode.out_of_range)


_FLOATS = tuple(dtype for dtype in ConvertDType if not dtype.is_of_gguf)
_DTYPES = {
    CheckpointFormat.hf: _FLOATS,
    CheckpointFormat.sharded: _FLOATS,
    CheckpointFormat.gguf: tuple(ConvertDType),
}
_WEIGHTED = tuple(dtype for dtype in ConvertDType if dtype.is_of_gguf and dtype is not ConvertDType.q8_0)
_SHARDED = {"format": one_of(CheckpointFormat.sharded)}


@dataclass
class ConvertConfig:
    """Write the checkpoint of `model.path` in another layout, sharding or dtype."""

    output: str | None = option(None, form=FOLDER)
    """Folder to create; it appears when it is complete."""
    format: CheckpointFormat = CheckpointFormat.hf
    tp: int = option(1, minimum=1, only_with=_SHARDED)
    """Tensor parallel ranks (format=sharded)."""
    pp: int = option(1, minimum=1, only_with=_SHARDED)
    """Pipeline parallel stages (format=sharded)."""
    dtype: ConvertDType = option(ConvertDType.auto, choices_by=("format", _DTYPES))
    """Dtype of the written tensors; auto: unchanged, and in GGUF the dtype of most tensors.

    A GGUF type such as q4_0 is the type of most matrices. llama-quantize's rules select the matrices with more bits.
    """
    imatrix: str | None = option(None, only_with={"dtype": one_of(*_WEIGHTED)})
    """File with an importance matrix of the model, as of quant.imatrix, for a GGUF type that uses it."""
    lora: str | None = option(None, form=(bool, "the folder of an adapter, or null"))
    """Folder of a LoRA adapter in PEFT's layout to merge into the weights."""
    max_shard_size: str = option(
        "5GB",
        form=(num_bytes, "a size such as 500MB, 5GB or 2GiB"),
        only_with={"format": one_of(CheckpointFormat.hf)},
    )
    """Most bytes of a weight file (format=hf): a number with B, KB, MB, GB, TB (1000s) or KiB, MiB, GiB, TiB (1024s).
    """
    overwrite: bool = False
    """Replace the model in `output`."""

    @property
    def max_shard_bytes(self) -> int:
        return num_bytes(self.max_shard_size)

    def __post_init__(self) -> None:
        check_fields(self, "convert")


@dataclass
class ExportConfig:
    """The model as a graph with packed weights, which runs without the model's code and checkpoint."""

    output: str | None = option(None, form=FOLDER)
    """Folder to create; it appears when it is complete and verified."""
    tp: int = option(1, minimum=1, maximum=512)
    """Tensor parallel ranks."""
    pp: int = option(1, minimum=1, maximum=512)
    """Pipeline parallel stages."""
    overwrite: bool = False
    """Replace the model in `output`."""

    def __post_init__(self) -> None:
        check_fields(self, "export")


@dataclass
class PrefixConfig:
    """Store the KV cache of prompts in a file, for rows that have these prefixes."""

    data: str | None = None
    """A prompt, a file or `-`, with rows as in predict."""
    output: str | None = option(None, form=(bool, "the file to make"))
    """File to create; it appears when it is complete."""
    add_special_tokens: bool = True
    """As in predict."""
    chat_template: str = option("auto", form=TEMPLATE)
    """As in predict."""

    def __post_init__(self) -> None:
        check_fields(self, "prefix")


@dataclass
class VerifyConfig:
    """Run rows of a finished job again under settings that must not change them."""

    folder: str | None = option(None, form=(bool, "the folder of a finished job"))
    """Folder of a finished job of task=predict, embed or score. Its config.yaml has the model and the rows."""
    rows: int = option(64, minimum=1)
    """Most rows to run, chosen at random from the job's rows."""
    seed: int = option(0, minimum=0)
    """Seed for the choice of rows."""

    def __post_init__(self) -> None:
        check_fields(self, "verify")


def _are_metrics(objective: Any) -> bool:
    names = objective if isinstance(objective, list) else [objective]
    return bool(names) and all(isinstance(name, str) and name for name in names)


@dataclass
class SweepConfig:
    """Settings of a sweep (-m)."""

    objective: Any = option(None, form=(_are_metrics, "the name of a metric, a list of such, or null"))
    """Result that each job returns to an optimising sweeper, such as Optuna's; null: nothing.

    The key of a number in metrics.json, such as decode_tokens_per_s or time_to_first_token_s.p50, or a list of keys.
    """
    select: str | None = None
    """The choice at the end of a sweep: `kl_mean<=0.01, peak_memory<=12GB, max decode_tokens_per_s`; null: none.

    Constraints on keys of metrics.json, and one `max` or `min` of a key. A constraint on a metric with an interval uses
    the end that is less favourable.
    """
    baseline: int = option(0, minimum=0)
    """Row of the table, from 0, from which the differences of the other rows are computed."""
    halving: bool = False
    """Score growing parts of evaluate.data, and stop a job that can no longer be the best: by `select`, else by
    KL divergence, or without a reference by perplexity.
    """

    def __post_init__(self) -> None:
        check_fields(self, "sweep")
        if self.select is not None:
            parse_selection(self.select)
