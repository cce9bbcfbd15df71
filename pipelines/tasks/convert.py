"""`task=convert`: write a checkpoint of any format in another format.

At most one tensor is in memory at a time, or one file of a pickled source.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from conf.constraints import typed
from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import DeviceConfig, DeviceType, ModelConfig, RunConfig
from models.formats.manifest import write_manifest
from pipelines.jobs import report
from pipelines.jobs.output_folder import complete_folder, refuse_existing
from pipelines.loading.model_source import resolve_model
from pipelines.tasks.conversion import open_conversion
from pipelines.tasks.convert_formats import writer_of


def run_convert(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Convert the model. Raises UserError before any file is written.

    `convert.output` is either complete or unchanged.
    """
    _refuse_unused(run)
    if run.convert.output is None:
        raise UserError("convert.output is missing: give the folder to make")
    start = time.perf_counter()
    source = resolve_model(run.model)
    target = Path(os.path.abspath(Path(run.convert.output).expanduser()))
    _refuse_overlap(target, source.checkpoint.path, output_dir)
    refuse_existing(target, run.convert.overwrite, "convert")
    conversion = open_conversion(run.model, run.convert, source)
    write = writer_of(run.convert, conversion)
    with report.progress_bar() as progress, complete_folder(target, run.convert.overwrite, "convert") as folder:
        write_manifest(folder, write(folder, progress.converted))
    written = [file.stat().st_size for file in target.rglob("*") if file.is_file()]
    metrics = {
        "num_tensors": sum(len(file.shapes) for file in conversion.files),
        "num_files": len(written),
        "bytes_read": conversion.num_source_bytes,
        "bytes_written": sum(written),
        "convert_s": time.perf_counter() - start,
        "peak_memory_bytes": report.peak_memory_bytes(torch.device("cpu")),
    }
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, target, output_dir)


REMEDIES = {  # for settings whose remedy is not "leave it out"
    "model.dtype": "give convert.dtype",
    "model.tokenizer": "its files are copied as they are",
    "quant.scheme": "give task=quantize, or convert.format=gguf and a convert.dtype",
}


def _refuse_unused(run: RunConfig) -> None:
    run.decode.check_unset("by task=convert", "leave it out")
    where = DeviceType.cpu if run.device.type is DeviceType.cpu else DeviceType.auto  # conversion runs on a CPU
    used = {name: getattr(run.model, name) for name in ("path", "hub", "revision", "allow_pickle", "verify")}
    unchanged = {"model": ModelConfig(**used), "quant": QuantConfig(), "device": DeviceConfig(where)}
    for group, section in unchanged.items():
        for name, default in vars(section).items():
            if (value := getattr(getattr(run, group), name)) != default:
                remedy = REMEDIES.get(f"{group}.{name}", "leave it out")
                raise UserError(f"{group}.{name}={typed(value)} is not used by task=convert: {remedy}")


def _refuse_overlap(target: Path, source: Path, output_dir: Path) -> None:
    output, input, run_folder = target.resolve(), source.resolve(), output_dir.resolve()
    if output == input or output in input.parents or input in output.parents:
        raise UserError(
            f"convert.output={target} is the source {source}, contains it or is in it: give a folder elsewhere"
        )
    if output == run_folder or output in run_folder.parents:
        raise UserError(
            f"convert.output={target} is or holds the run's own folder {output_dir}: give a folder elsewhere"
        )


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
