"""The grammar of `sweep.select`: which job of a sweep is the best.

`kl_mean<=0.01, peak_memory<=12GB, max decode_tokens_per_s`: constraints `METRIC OP VALUE[UNIT]`, and exactly one
objective `max METRIC` or `min METRIC`, separated by commas. A metric is a key of a job's metrics.json. A metric
`NAME_bytes` may be written `NAME`.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from conf.errors import ErrorCode, UserError, list_known_names, shortened
from conf.support.sizes import num_bytes

KEY = "sweep.select"
METRIC = r"[A-Za-z_][\w./-]*"
CONSTRAINT = re.compile(rf"({METRIC})\s*(<=|>=|<|>)\s*(\S.*)")
OBJECTIVE = re.compile(rf"(max|min)\s+({METRIC})")
FORM = "constraints as kl_mean<=0.01 or peak_memory<=12GB and one max METRIC or min METRIC, separated by commas"
BYTES = "_bytes"
# The numbers that tasks write into metrics.json, and objects of numbers: time_to_first_token_s.p50, probe.kl_mean.
KNOWN = (
    "accuracy", "perplexity", "nll_per_token", "kl_mean", "kl_p99", "top1_agreement", "decode_tokens_per_s",
    "prefill_tokens_per_s", "tokens_per_s", "prompt_tokens_per_s", "time_to_first_token_s", "time_per_output_token_s",
    "acceptance", "share_of_windows", "weight_bytes", "peak_memory_bytes", "kv_bytes", "state_bytes",
    "memory_bandwidth_bytes_per_s", "decode_share_of_bandwidth", "load_s", "start_s", "run_s", "generate_s",
    "evaluate_s", "quantize_s", "convert_s", "export_s",
    "prefix_s", "num_prompts", "num_errors", "num_blank_lines", "num_resumed_rows", "num_truncated_rows",
    "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_drafted_tokens", "num_accepted_tokens",
    "num_scored_tokens", "num_questions", "num_answers", "num_values", "num_kept_prompts", "num_kept_tokens",
    "num_layers", "num_tensors", "num_nodes", "num_files", "bytes_read", "bytes_written", "weight_bytes_before",
    "perplexity_before", "sparsity", "probe", "seed",
)  # fmt: skip
OPEN = "tasks."  # lm_eval names these metrics
TASKS = ("predict", "bench", "evaluate", "convert", "export", "quantize", "prefix", "embed", "score")


@dataclass(frozen=True)
class Limit:
    """A constraint: `metric` must be on one side of `bound`."""

    metric: str
    operator: str
    """<=, >=, < or >."""
    bound: float
    text: str
    """The constraint as the user wrote it."""

    @property
    def is_upper(self) -> bool:
        return self.operator.startswith("<")

    def holds(self, value: float) -> bool:
        if value == self.bound:
            return "=" in self.operator
        return (value < self.bound) is self.is_upper


@dataclass(frozen=True)
class Selection:
    limits: tuple[Limit, ...]
    is_max: bool
    objective: str


def parse_selection(text: str) -> Selection:
    """Return the constraints and the objective of a text.

    Raises UserError for a wrong form, and for a metric that no task writes.
    """
    limits, objectives = list[Limit](), list[tuple[str, str]]()
    for part in (part.strip() for part in text.split(",")):
        if match := OBJECTIVE.fullmatch(part):
            objectives.append((match[1], _known(match[2])))
        elif match := CONSTRAINT.fullmatch(part):
            metric = _known(match[1])
            limits.append(Limit(metric, match[2], _bound(metric, match[3], part), part))
        else:
            raise _malformed(f"{KEY} has {shortened(part)!r}")
    if len(objectives) != 1:
        raise _malformed(f"{KEY}={shortened(text)!r} has {len(objectives)} objectives")
    return Selection(tuple(limits), objectives[0][0] == "max", objectives[0][1])


def full_name(metric: str, names: Collection[str]) -> str | None:
    """Return the name in `names` of a metric that may lack `_bytes`; None if there is none."""
    return next((name for name in (metric, metric + BYTES) if name in names), None)


def unmeasured(metric: str, names: Collection[str]) -> UserError:
    return UserError(
        f"{KEY} has {metric}, which no job measured: {list_known_names(names, metric)}", ErrorCode.unknown_name, KEY
    )


def _known(metric: str) -> str:
    """Return the full name of a metric. Raises UserError for a metric that no task writes."""
    task, _, rest = metric.partition(".")
    name = rest if task in TASKS and rest else metric
    if name.startswith(OPEN):
        return metric
    base, dot, percentile = name.partition(".")
    full = full_name(base, KNOWN)
    if full is None:
        problem = f"{KEY} has the unknown metric {metric}"
        raise UserError(f"{problem}: {list_known_names(KNOWN, metric)}", ErrorCode.unknown_name, KEY)
    return metric.removesuffix(name) + full + dot + percentile


def _bound(metric: str, text: str, part: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float(num_bytes(text)) or math.nan
        if math.isfinite(number) and not metric.endswith((BYTES, "_bytes_per_s")):
            problem = f"{KEY} has {shortened(part)!r}, but {metric} is not a number of bytes"
            raise UserError(f"{problem}: give a number without a unit", ErrorCode.malformed, KEY) from None
    if not math.isfinite(number):
        raise _malformed(f"{KEY} has {shortened(part)!r}, whose value is neither a number nor a size")
    return number


def _malformed(problem: str) -> UserError:
    return UserError(f"{problem}: give {FORM}", ErrorCode.malformed, KEY)
