"""`task=convert`: a checkpoint of any layout, written in another. In memory is one tensor at a time, or a file of a pickled source."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conf.errors import UserError
from conf.schema import CheckpointFormat, ConvertConfig, ConvertDType, ModelConfig, RunConfig, typed
from models.causal_lm import CausalLM
from models.formats import Checkpoint, WeightFile
from models.formats.gguf_writer import write_gguf
from models.formats.huggingface import CONFIG
from models.formats.huggingface_writer import write_companions, write_huggingface
from models.formats.manifest import MANIFEST, write_manifest
from models.formats.safetensors_writer import entries_of
from models.formats.sharded import write_sharded
from models.lora import merge_lora
from models.partition import partition
from models.registry import find_architecture
from models.weights import DTYPES, CastFile, checkpoint_dtype, match_tensors, parameter_shapes
from pipelines import report
from pipelines.loading import find_and_open

GGUF_FILE = "model.gguf"


def run_convert(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Raises UserError before anything is written. What is at `convert.output` afterwards is complete, or what was there before."""
    _refuse_unused(run.model)
    if run.convert.output is None:
        raise UserError("convert.output is missing: give the folder to make")
    start = time.perf_counter()
    checkpoint = find_and_open(run.model)
    target = Path(os.path.abspath(Path(run.convert.output).expanduser()))
    _refuse_overlap(target, checkpoint.path, output_dir)
    _refuse_existing(target, run.convert.overwrite)
    architecture = find_architecture(checkpoint.config)
    with torch.device("meta"):
        model = architecture.build(architecture.read_config(checkpoint.config))
    files = checkpoint.open_weights(parameter_shapes(model))
    num_source_bytes = sum(entry.nbytes for entry in entries_of(files))
    matched = match_tensors(model, files, architecture.ignored_tensors)
    if run.convert.lora is not None:
        files = merge_lora(files, Path(run.convert.lora).expanduser(), model)
    dtype = DTYPES.get(run.convert.dtype.name)
    if dtype is not None:
        files = [CastFile(file, model, matched, dtype) for file in files]
    write = _writer(run.convert, replace(checkpoint, open_weights=lambda expected: files), model, matched, dtype)
    with report.progress_bar() as progress, complete_folder(target, run.convert.overwrite) as folder:
        write_manifest(folder, write(folder, progress.converted))
    metrics = {
        "num_tensors": sum(len(file.shapes) for file in files),
        "num_files": sum(1 for _ in target.iterdir()),
        "bytes_read": num_source_bytes,
        "bytes_written": sum(file.stat().st_size for file in target.iterdir()),
        "convert_s": time.perf_counter() - start,
        "peak_memory_bytes": report.peak_memory_bytes(torch.device("cpu")),
    }
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, target, output_dir)


Write = Callable[[Path, Callable[[int, int], None]], dict[str, str]]
"""Writes a model into a folder, telling bytes done and in all; returns the sha256 of those files of which it knows it."""


def _writer(
    config: ConvertConfig, checkpoint: Checkpoint, model: CausalLM, matched: dict[str, str], dtype: torch.dtype | None
) -> Write:
    """Raises UserError for a division that the model does not take."""
    files = checkpoint.open_weights(parameter_shapes(model))
    names = {name: matched.get(name) for file in files for name in file.shapes}
    places = partition(model, names, config.tp, config.pp) if config.format is CheckpointFormat.sharded else {}

    def write(folder: Path, on_bytes: Callable[[int, int], None]) -> dict[str, str]:
        if config.format is CheckpointFormat.gguf:
            write_gguf(checkpoint, folder / GGUF_FILE, _gguf_dtype(config, checkpoint, files), on_bytes)
            return {}
        write_companions(checkpoint, folder, dtype)
        if config.format is CheckpointFormat.hf:
            return write_huggingface(files, folder, config.max_shard_bytes, on_bytes)
        return write_sharded(files, folder, places, config.tp, config.pp, on_bytes)

    return write


def _gguf_dtype(config: ConvertConfig, checkpoint: Checkpoint, files: list[WeightFile]) -> str:
    """auto: what config.json says, else what the first tensor is."""
    if config.dtype is not ConvertDType.auto:
        return config.dtype.name
    stored = checkpoint.config.raw("torch_dtype") or checkpoint.config.raw("dtype") or checkpoint_dtype(files)
    return str(stored).removeprefix("torch.")


def _refuse_unused(model: ModelConfig) -> None:
    unchanged = ModelConfig(path=model.path)
    for name, remedy in {
        "dtype": "give convert.dtype",
        "weights": "leave it at checkpoint",
        "tokenizer": "its files are copied as they are",
        "max_length": "leave it out",
    }.items():
        if (value := getattr(model, name)) != getattr(unchanged, name):
            raise UserError(f"model.{name}={typed(value)} is not used by task=convert: {remedy}")


def _refuse_overlap(target: Path, source: Path, output_dir: Path) -> None:
    """The source is never touched, and nothing but the model gets into the target."""
    made, read, run = target.resolve(), source.resolve(), output_dir.resolve()
    if made == read or made in read.parents or read in made.parents:
        raise UserError(f"convert.output={target} is, holds or lies in the source {source}: give a folder elsewhere")
    if made == run or made in run.parents:
        raise UserError(
            f"convert.output={target} is or holds the run's own folder {output_dir}: give a folder elsewhere"
        )


@contextmanager
def complete_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """An empty folder beside `target`, which takes its name when the block ends well and is removed when it does not.

    Killed, the process leaves the hidden folder, and the next conversion to this target removes it; killed between the two renames of an
    overwriting, it leaves the old model beside, hidden too. Raises UserError as `_refuse_existing` does.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = (target.with_name(f".{target.name}.{what}") for what in ("partial", "replaced"))
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another conversion writes convert.output={target}: wait for it, or give another folder"
            ) from error
        try:
            for leftover in partial.iterdir():
                leftover.unlink()
            yield partial
            for path in (*partial.iterdir(), partial):
                _sync(path)
            _refuse_existing(target, overwrite)  # by now there may be one
            shutil.rmtree(replaced, ignore_errors=True)
            if target.exists():
                os.rename(target, replaced)
            os.rename(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            if replaced.exists() and not target.exists():
                os.rename(replaced, target)
            raise
        _sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        os.close(lock)


def _refuse_existing(target: Path, overwrite: bool) -> None:
    """Raises UserError where anything is at `target`, or with `overwrite` what is no model and no empty folder."""
    if not target.exists() and not target.is_symlink():
        return
    if not overwrite:
        raise UserError(f"convert.output={target} exists: give another folder, or convert.overwrite=true to replace it")
    is_model = any((target / name).is_file() for name in (CONFIG, MANIFEST))
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.is_symlink() or not (is_model or is_empty):
        raise UserError(
            f"convert.output={target} is not the folder of a model, which alone is replaced: remove it yourself"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _print(metrics: dict[str, Any], target: Path, output_dir: Path) -> None:
    report.print_table(
        [
            ("tensors", f"{metrics['num_tensors']:,}"),
            ("read", f"{metrics['bytes_read'] / 1e6:,.1f} MB"),
            ("written", f"{metrics['bytes_written'] / 1e6:,.1f} MB in {metrics['num_files']} files"),
            ("time", f"{metrics['convert_s']:.2f} s"),
            ("peak memory", f"{metrics['peak_memory_bytes'] / 1e6:,.0f} MB"),
        ]
    )
    print(f"model: {target}")
    print(f"output: {output_dir}")
