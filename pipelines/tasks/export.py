"""`task=export`: write a model as its graph and packed weights, which run without the model's code and checkpoint."""

import json
import os
import time
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.quantization import Activations
from conf.schema import DeviceConfig, DeviceType, ModelConfig, ParallelConfig, ParallelMode, RunConfig, Weights
from models.formats.manifest import write_manifest
from pipelines.jobs import report
from pipelines.jobs.output_folder import complete_folder, refuse_existing
from pipelines.loading.device import prepare_device
from pipelines.loading.fingerprint import plain_quant
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.calibrated import calibrated
from pipelines.loading.request_settings import read_request_settings
from pipelines.tasks.export_files import write_export
from pipelines.tasks.export_parts import load_parts, prove
from pipelines.tasks.export_steps import Steps


def run_export(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Export the model. Raises UserError. `export.output` is either complete and verified, or unchanged."""
    _check_settings(run)
    assert run.export.output is not None
    metrics = export_model(run, Path(run.export.output), run.export.overwrite)
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, absolute(run.export.output), output_dir)


def export_model(run: RunConfig, output: Path, overwrite: bool) -> dict[str, Any]:
    """Write the exported form of the run's model to `output`, and return its metrics.

    `output` is made only when the export is complete and verified. Raises UserError for a model or a device that cannot
    be exported, and if one bit of the exported model's results differs from the model's results.
    """
    target = absolute(output)
    refuse_existing(target, overwrite, "export")
    start = time.perf_counter()
    device = prepare_device(run.device)
    if device.type != "cpu":
        raise UserError("task=export packs weights for a CPU: give device=cpu")
    source = resolve_model(run.model)
    if source.exported is not None:
        raise UserError(f"{run.model.path} is exported already: give the model that it was made of")
    ready = calibrated(run, source, report.NO_PROGRESS)
    settings = read_request_settings(ready.options, ready.source)
    plan = plan_model(ready.options, ready.quant, ready.source, device, packed=True)
    steps = Steps.of(plan.model)
    parts = load_parts(plan, run.export.tp, run.export.pp, steps)
    with complete_folder(target, overwrite, "export") as folder:
        refused = write_export(folder, plan, parts, plain_quant(run.quant), settings.eos_token_ids)
        exported = prove(folder, parts, steps)
        write_manifest(folder, {})
    sizes = [file.stat().st_size for file in target.rglob("*") if file.is_file()]
    return {
        "num_nodes": sum(len(model.graph.body) + len(model.graph.head) for model in exported),
        "num_files": len(sizes),
        "bytes_written": sum(sizes),
        "runner_refuses_texts": refused,
        "export_s": time.perf_counter() - start,
        "peak_memory_bytes": report.peak_memory_bytes(device),
    }


def _print(metrics: dict[str, Any], target: Path, output_dir: Path) -> None:
    rows = [
        ("nodes", f"{metrics['num_nodes']:,}"),
        ("written", f"{metrics['bytes_written'] / 1e6:,.1f} MB in {metrics['num_files']} files"),
        ("time", f"{metrics['export_s']:.2f} s"),
    ]
    if refused := metrics["runner_refuses_texts"]:
        rows.append(("runner", f"takes token ids alone, because its tokenizer cannot be used: {refused}"))
    report.print_table(rows)
    print(f"model: {target}")
    print(f"output: {output_dir}")


def absolute(output: str | Path) -> Path:
    return Path(os.path.abspath(Path(output).expanduser()))


def _check_settings(run: RunConfig) -> None:
    if run.export.output is None:
        raise UserError("export.output is missing: give the folder to make")
    run.decode.check_unset("by task=export", "leave it out")
    check_exportable(run.model, run.parallel, run.device, "task=export")
    if run.model.max_length is not None:
        raise UserError("model.max_length is not used by task=export: leave it out")
    if run.quant.activations is Activations.auto:
        raise UserError(
            "quant.activations=auto is a choice of each run: leave it out, and give it where the exported model runs"
        )


def check_exportable(model: ModelConfig, parallel: ParallelConfig, device: DeviceConfig, user: str) -> None:
    """Raise UserError for settings with which `user`, an option that exports, does not work."""
    refused = {
        "model.weights=random": model.weights is Weights.random,
        "model.keep_packed=true": model.keep_packed,
        f"parallel={parallel.mode.name}": parallel.mode is not ParallelMode.single,
        "device=cuda": device.type is DeviceType.cuda,
    }
    for setting, is_set in refused.items():
        if is_set:
            raise UserError(f"{setting} is not used by {user}: leave it out")
