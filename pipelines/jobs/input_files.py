"""The files that a run reads, by name: the dotted key of their setting, with the file's place in a folder."""

import glob
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from conf.errors import UserError
from conf.schema import RunConfig, Task, Weights
from models.formats.hub import find_downloaded
from models.tokenizers.template_files import NAMED_TEMPLATES
from pipelines.jobs.hub_commits import DRAFT, REFERENCE, TOKENIZER, loads_a_model
from pipelines.jobs.report import LOCK

CONFIGS = (
    "*.json",
    "*.jinja",
    f"{NAMED_TEMPLATES}/*.jinja",
    "*.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
    "*.yaml",
    "*.yml",
)
"""Files of a model's config and tokenizer."""
WEIGHTS = ("*.safetensors", "*.gguf", "*.pt2", "*.npy", "*.ckpt", "*.pdparams", "rank_*/*", "[0-9]*_*/*")
PICKLES = ("*.bin", "*.pt", "*.pth")  # read only if there is no other file of weights
SPLIT = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")  # name of a part of a split GGUF model
JOB_FILES = ("config.yaml", "predictions.jsonl", "rows.jsonl", "embeddings.npy", "scores.jsonl")
COMPARED = ("samples.jsonl", LOCK)  # what an evaluate run reads of an earlier one
SINGLE = ("data", "questions", "chat_template", "plan", "imatrix")  # settings whose value may name a file


def input_files(run: RunConfig) -> dict[str, Path]:
    """Return the files of the run's models, adapters, data and templates that are on this machine.

    `run`: of `with_commits`. A hub id that is not downloaded yet has no files.
    """
    if run.task is Task.verify:
        return _files_of_job(run)
    files = {f"device.kept_prefixes.{number}": Path(path) for number, path in enumerate(run.device.kept_prefixes)}
    files |= {key: Path(text).expanduser() for key, text in _single(run) if _is_file(text)}
    if run.task is Task.evaluate and run.evaluate.against:
        against = Path(run.evaluate.against).expanduser()
        files |= {f"evaluate.against/{name}": file for name in COMPARED if (file := against / name).is_file()}
    for key, path in _folders(run):
        has_weights = key != TOKENIZER and (key != "model.path" or run.model.weights is Weights.checkpoint)
        files |= {f"{key}/{name}": file for name, file in _files_in(path, has_weights).items()}
    return dict(sorted(files.items()))


def _files_of_job(run: RunConfig) -> dict[str, Path]:
    """Return the files of the job in `verify.folder`: its config and results, and the files that it reads."""
    from conf.compose import saved_run  # imported here: servers and engines run without Hydra

    folder = Path(run.verify.folder or "").expanduser()
    files = {f"verify.folder/{name}": folder / name for name in JOB_FILES if (folder / name).is_file()}
    with suppress(UserError):  # the task refuses such a folder
        job = saved_run(folder)
        files |= input_files(job) if job.task.reads_rows else {}
    return files


def _single(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that may name a file. A value may also be a prompt or a template's name."""
    for group in dict.fromkeys((run.task.name, *(["predict"] if run.task.reads_rows else []), "quant", "calibrate")):
        for name in SINGLE:
            if isinstance(text := getattr(getattr(run, group), name, None), str):
                yield f"{group}.{name}", text


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # a prompt that is too long for a path, or not a valid one
        return False


def _folders(run: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yield the folders, or the files of models, by key."""
    model, evaluate = run.model, run.evaluate
    if not loads_a_model(run):
        return
    paths = {TOKENIZER: model.tokenizer, DRAFT: run.decode.speculation.model_path, "convert.lora": run.convert.lora}
    if run.task is Task.evaluate:
        paths |= {REFERENCE: evaluate.reference, "evaluate.tasks_folder": evaluate.tasks_folder}
    for kind in ("adapters", "prefixes"):
        paths |= {f"model.{kind}.{name}": path for name, path in (getattr(model, kind) or {}).items()}
    if path := find_downloaded(model.path, model.hub, model.revision):
        yield "model.path", path
    for key, id in paths.items():
        if id and (path := find_downloaded(id, model.hub, None)):
            yield key, path


def _files_in(path: Path, has_weights: bool) -> dict[str, Path]:
    """Return the files of a model or a tokenizer by their names in its folder. Of a GGUF model all parts."""
    if not path.is_dir():
        pattern = SPLIT.sub(r"-?????\1", glob.escape(path.name))
        return {file.name: file for file in path.parent.glob(pattern) if file.is_file()}
    return _matches(path, CONFIGS) | (weight_files(path) if has_weights else {})


def weight_files(path: Path) -> dict[str, Path]:
    """Return the files of a model's weights by their names in its folder. Of a GGUF model all parts."""
    return (_matches(path, WEIGHTS) or _matches(path, PICKLES)) if path.is_dir() else _files_in(path, True)


def _matches(folder: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    files = (file for pattern in patterns for file in folder.glob(pattern))
    shown = (file for file in files if file.is_file() and not file.name.startswith("."))
    return {str(file.relative_to(folder)): file for file in shown}
