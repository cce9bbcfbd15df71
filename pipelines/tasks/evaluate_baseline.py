"""The earlier run of `evaluate.against`: its samples, and whether it measured the same data with the same reference."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.schema import ModelConfig
from models.formats.hub import find_downloaded
from pipelines.jobs.hub_commits import REFERENCE
from pipelines.jobs.input_files import weight_files
from pipelines.jobs.report import LOCK
from pipelines.jobs.run_lock import hash_file
from pipelines.tasks.evaluate_samples import DOCUMENT, QUESTION, SAMPLES, WINDOW, Key, Sample, by_key

SETTINGS = {
    WINDOW: "evaluate.data, evaluate.window and evaluate.stride, and a model with its tokenizer",
    QUESTION: "evaluate.questions",
    DOCUMENT: "evaluate.tasks, evaluate.num_fewshot and evaluate.limit",
}
"""What the samples of a kind come from."""


@dataclass(frozen=True)
class Baseline:
    folder: Path
    samples: dict[Key, Sample]

    def check_data(self, kind: str, inputs: Mapping[str, str]) -> None:
        """Raise UserError unless it has the samples of this kind, and no others. `inputs`: their digests by id."""
        before = {id: sample["input"] for (other_kind, id), sample in self.samples.items() if other_kind == kind}
        same = f"give that run's {SETTINGS[kind]}"
        if len(before) != len(inputs):
            raise UserError(f"{self._where} measured {_count(len(before), kind)}, and this run {len(inputs)}: {same}")
        if other := next((id for id, digest in inputs.items() if before.get(id) != digest), None):
            raise UserError(f"{self._where} measured another {kind} {other}: {same}")

    def check_tasks(self, tasks: list[str]) -> None:
        """Raise UserError if only one of the runs has tasks. lm_eval reads their documents when it runs them."""
        if not tasks:
            self.check_data(DOCUMENT, {})
        elif not any(kind == DOCUMENT for kind, _ in self.samples):
            raise UserError(f"{self._where} measured no evaluate.tasks: leave them out, or give a run that has them")

    def check_reference(self, reference: str, model: ModelConfig) -> None:
        """Raise UserError if both runs have a reference, but not the same weights. Its run.lock has their hashes."""
        if reference == "none" or not any("kl" in sample for sample in self.samples.values()):
            return
        path = find_downloaded(reference, model.hub, None)
        before = _locked_hashes(self.folder)
        for name, file in weight_files(path).items() if path else ():
            if before.get(f"{REFERENCE}/{name}") != hash_file(file).sha256:
                problem = f"{self._where} had another {REFERENCE}, because {name} differs"
                raise UserError(f"{problem}: give the same model, or {REFERENCE}=none")

    @property
    def _where(self) -> str:
        return f"evaluate.against={self.folder}"


def read_baseline(against: str) -> Baseline:
    """Return an evaluate run's folder. Raises UserError for another folder, and for a damaged file."""
    folder = Path(against).expanduser()
    where = f"evaluate.against={folder}"
    if not folder.is_dir():
        raise UserError(f"{where} is not a folder: give the folder of a finished task=evaluate")
    path = folder / SAMPLES
    if not path.is_file():
        raise UserError(f"{where} has no {SAMPLES}: give the folder of a finished task=evaluate")
    try:
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")  # not splitlines: an answer may have a U+2028
        samples = by_key(_parse(line, number) for number, line in enumerate(lines, 1))
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: {SAMPLES} is damaged ({error}): evaluate that model again") from error
    return Baseline(folder, samples)


def _parse(line: bytes, number: int) -> Sample:
    """Return a line's sample. Raises ValueError if a field that comparisons read has no allowed value."""
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is not JSON") from error
    fields = FIELDS.get(sample.get("kind")) if isinstance(sample, dict) else None
    if fields is None:
        raise ValueError(f"line {number} is not a sample")
    for name, is_allowed in (COMMON | fields).items():
        if not is_allowed(sample.get(name)):
            raise ValueError(f"line {number} has no valid {name}")
    return dict(sample)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # an int may be beyond the largest float


def _is_optional_number(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


Check = Callable[[Any], bool]
COMMON: dict[str, Check] = {"id": _is_text, "input": _is_text}
FIELDS: dict[Any, dict[str, Check]] = {
    WINDOW: {"num_tokens": _is_count, "nll": _is_number, "kl": _is_optional_number, "num_agreed": _is_optional_number},
    QUESTION: {"score": lambda value: value in (0, 1)},
    DOCUMENT: {"task": _is_text, "filter": _is_text, "metrics": _are_numbers},
}


def _count(number: int, kind: str) -> str:
    return f"{number} {kind}{'' if number == 1 else 's'}"


def _locked_hashes(folder: Path) -> dict[str, Any]:
    """Return the SHA-256 of the inputs of a run, by name. Raises UserError without a readable run.lock."""
    try:
        files = json.loads((folder / LOCK).read_bytes())["files"]
        return {name: file["sha256"] for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"evaluate.against={folder} has no {LOCK} that names its {REFERENCE} ({type(error).__name__})"
        raise UserError(f"{problem}: evaluate that model again, or give {REFERENCE}=none") from error
