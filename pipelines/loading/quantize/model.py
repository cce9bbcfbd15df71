"""Make the folder of a quantised model: calibrate layer by layer, and measure the loss of quality for a report."""

import logging
from pathlib import Path
from typing import Any

from conf.schema import RunConfig
from pipelines.engine import Engine
from pipelines.jobs import report
from pipelines.jobs.output_folder import complete_folder
from pipelines.loading.assembly import assemble
from pipelines.loading.model_source import ModelSource
from pipelines.loading.planning import plan_model, without_quantization
from pipelines.loading.quantize.job import job_of
from pipelines.loading.quantize.layers import calibration_batches, calibration_cache, quantize_layers
from pipelines.loading.quantize.preflight import Preflight, preflight
from pipelines.loading.quantize.report import Predictions, write_report
from pipelines.loading.quantize.share import Share
from pipelines.loading.request_settings import RequestSettings, read_request_settings
from quantization.file_layout import sparsity_config
from quantization.part_files import PartFiles
from quantization.quantizer import num_zeros
from quantization.smoothing_record import mark_smoothing

log = logging.getLogger(__name__)


def make_model(
    run: RunConfig, source: ModelSource, target: Path, progress: report.ProgressSink, with_report: bool
) -> dict[str, Any]:
    """Quantise into the folder `target`, and return metrics.

    With a report, they include metrics on held-out text. Raises UserError.
    """
    samples = f"{run.calibrate.num_samples} samples of at most {run.calibrate.sequence_length} tokens"
    sparsity = f" and quant.sparsity ({run.quant.sparsity})" if run.quant.sparsity.prunes else ""
    what = f"{run.model.path} by quant={run.quant.scheme.name}{sparsity}"
    settings = read_request_settings(run.model, source)
    ready = preflight(run, source, settings, target.parent)
    source.warn_of_unread_keys()
    log.warning("calibrating %s on %s: %s; it is kept in %s", what, samples, ready.duration, target)
    with progress.calibrating():
        float_run = without_quantization(run)
        if not run.parallel.mode.divides:
            engine = assemble(ready.plan, float_run.device, float_run.decode, settings, 1, progress.loaded)
            batches, cache = calibration_batches(engine, ready.data.samples), calibration_cache(engine)
            share = Share(run.quant, ready.layout, engine.executor.model, batches, cache)
            return _make(run, engine, share, ready, target, progress, with_report)
        return _make_with_ranks(run, float_run, settings, ready, target, progress, with_report)


def _make_with_ranks(
    run: RunConfig,
    float_run: RunConfig,
    settings: RequestSettings,
    ready: Preflight,
    target: Path,
    progress: report.ProgressSink,
    with_report: bool,
) -> dict[str, Any]:
    from pipelines.loading.driver import start_driver
    from pipelines.loading.quantize.ranks import DriverShare  # here, because a run without ranks does not need it

    whole = ready.plan
    driver = start_driver(float_run, whole)
    try:
        plan = driver.part(plan_model(float_run.model, float_run.quant, whole.source, whole.device, packed=False))
        engine = assemble(plan, float_run.device, float_run.decode, settings, 1, progress.loaded, driver=driver)
        batches, cache = calibration_batches(engine, ready.data.samples), calibration_cache(engine)
        share = DriverShare(run, ready.layout, plan, whole, batches, cache, driver.workers)
        return _make(run, engine, share, ready, target, progress, with_report)
    finally:
        driver.close()


def _make(
    run: RunConfig,
    engine: Engine,
    share: Share,
    ready: Preflight,
    target: Path,
    progress: report.ProgressSink,
    with_report: bool,
) -> dict[str, Any]:
    model, source, layout, data = engine.executor.model, ready.plan.source, ready.layout, ready.data
    whole = ready.plan.model
    bytes_before, num_weights = engine.executor.weight_bytes, sum(parameter.numel() for parameter in whole.parameters())
    with complete_folder(target, run.quantize.overwrite, "quantize", resumable=True) as folder:
        files = PartFiles.begin(folder, job_of(run, source))
        files.write_rest(share.rest())  # before the predictions, which may normalise a head in place
        before = Predictions(engine, data.held_out) if with_report else None
        reports = quantize_layers(share, files, progress)
        metrics: dict[str, Any] = {
            "num_layers": len(reports),
            "weight_bytes_before": bytes_before,
            "weight_bytes": engine.executor.weight_bytes,
            "peak_memory_bytes": report.peak_memory_bytes(engine.device) + engine.executor.other_ranks_peak_bytes,
        }
        zeros = num_zeros(whole, reports) / num_weights
        if layout.pruned:
            metrics["sparsity"] = zeros
        if before is not None:
            if run.quant.has_static_kv_cache:
                engine.run_over(model, share.static_cache(engine.executor.cache))
            metrics |= before.compared_with(engine)
            write_report(folder, run, data.source, reports, metrics)
        sparsity = sparsity_config(whole, run.quant.sparsity, layout.pruned, zeros)
        config = {"quantization_config": layout.config | sparsity, **mark_smoothing(run.quant)}
        files.complete(source.checkpoint, share.is_tied, config, engine.dtype)
    return metrics
