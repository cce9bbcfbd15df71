"""Makes the folder of a quantised model: calibrates layer by layer and measures, for a report, what that costs in quality."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.schema import RunConfig
from models.weights import refuse_damaged
from pipelines import report
from pipelines.assembly import assemble
from pipelines.engine import Engine
from pipelines.opening import ModelSource
from pipelines.output_folder import complete_folder
from pipelines.planning import without_quantization
from pipelines.quantize.job import job_of
from pipelines.quantize.layers import quantize_cache, quantize_layers
from pipelines.quantize.preflight import Preflight, preflight
from pipelines.quantize.report import Predictions, write_report
from pipelines.request_settings import read_request_settings
from quantization.part_files import PartFiles
from quantization.quantizer import parts_of
from quantization.smoothing_record import mark_smoothing

log = logging.getLogger(__name__)


def make_model(
    run: RunConfig, source: ModelSource, target: Path, progress: report.ProgressSink, with_report: bool
) -> dict[str, Any]:
    """Quantise into the folder `target`, and return metrics, with a report those of held-out text too. Raises UserError."""
    samples = f"{run.calibrate.num_samples} samples of at most {run.calibrate.sequence_length} tokens"
    what = f"{run.model.path} by quant={run.quant.scheme.name}"
    settings = read_request_settings(run.model, source)
    ready = preflight(run, source, settings, target.parent)
    source.warn_of_unread_keys()
    log.warning("calibrating %s on %s: %s; it is kept in %s", what, samples, ready.duration, target)
    with progress.calibrating():
        float_run = replace(run, model=replace(run.model, keep_packed=False))  # it is read once
        engine = assemble(without_quantization(float_run), ready.plan, settings, 1, progress.loaded)
        return _make(run, engine, ready, target, progress, with_report)


def _make(
    run: RunConfig,
    engine: Engine,
    ready: Preflight,
    target: Path,
    progress: report.ProgressSink,
    with_report: bool,
) -> dict[str, Any]:
    model, source, layout, data = engine.runner.model, ready.plan.source, ready.layout, ready.data
    refuse_damaged(model)
    bytes_before = engine.runner.weight_bytes
    with complete_folder(target, run.quantize.overwrite, "quantize", resumable=True) as folder:
        files = PartFiles.begin(folder, job_of(run, source), layout.layout_of)
        # Before predictions, which may normalise a head in place.
        files.write_rest(model, parts_of(model, layout.schemes))
        before = Predictions(engine, data.held_out) if with_report else None
        reports = quantize_layers(engine, run.quant, layout.schemes, data.samples, files, progress)
        metrics: dict[str, Any] = {
            "num_layers": len(reports),
            "weight_bytes_before": bytes_before,
            "weight_bytes": engine.runner.weight_bytes,
            "peak_memory_bytes": report.peak_memory_bytes(engine.device),
        }
        if before is not None:
            if run.quant.has_static_kv_cache:
                quantize_cache(engine, run.quant.kv_cache)
            metrics |= before.compared_with(engine)
            write_report(folder, run, data.source, reports, metrics)
        config = {"quantization_config": layout.config, **mark_smoothing(run.quant)}
        files.complete(source.checkpoint, model, config, engine.dtype)
    return metrics
