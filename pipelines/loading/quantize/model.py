"""Make the folder of a quantised model: calibrate layer by layer, and measure the loss of quality for a report."""

import logging
from pathlib import Path
from typing import Any

from pipelines.engine import Engine
from pipelines.jobs import report
from pipelines.jobs.output_folder import complete_folder
from pipelines.loading.model_source import ModelSource
from pipelines.loading.quantize.float_engine import float_engine
from pipelines.loading.quantize.job import QuantizeJob
from pipelines.loading.quantize.layers import quantize_layers
from pipelines.loading.quantize.preflight import Preflight, preflight
from pipelines.loading.quantize.report import Predictions, write_report
from pipelines.loading.quantize.share import Share
from pipelines.loading.request_settings import read_request_settings
from quantization.file_layout import sparsity_config
from quantization.part_files import PartFiles
from quantization.quantizer import num_zeros
from quantization.smoothing_record import mark_smoothing

log = logging.getLogger(__name__)


def make_model(
    job: QuantizeJob,
    source: ModelSource,
    target: Path,
    progress: report.ProgressSink,
    with_report: bool,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Quantise into the folder `target`, and return metrics.

    With a report, they include metrics on held-out text. `overwrite`: replace an existing folder. Raises UserError.
    """
    samples = f"{job.calibrate.num_samples} samples of at most {job.calibrate.sequence_length} tokens"
    sparsity = f" and quant.sparsity ({job.quant.sparsity})" if job.quant.sparsity.prunes else ""
    description = f"{job.model.path} by quant={job.quant.scheme.name}{sparsity}"
    settings = read_request_settings(job.model, source)
    ready = preflight(job, source, settings, target.parent, with_report)
    source.warn_of_unread_keys()
    log.warning("calibrating %s on %s: %s; it is kept in %s", description, samples, ready.duration, target)
    with (
        progress.calibrating(),
        float_engine(job, settings, ready.plan, ready.layout, ready.data.samples, progress) as (engine, share),
        complete_folder(target, overwrite, "quantize", resumable=True) as folder,
    ):
        return _make(job, engine, share, ready, folder, progress, with_report)


def _make(
    job: QuantizeJob,
    engine: Engine,
    share: Share,
    ready: Preflight,
    folder: Path,
    progress: report.ProgressSink,
    with_report: bool,
) -> dict[str, Any]:
    model, source, layout, data = engine.executor.model, ready.plan.source, ready.layout, ready.data
    full_model = ready.plan.model
    bytes_before, num_weights = (
        engine.executor.weight_bytes,
        sum(parameter.numel() for parameter in full_model.parameters()),
    )
    files = PartFiles.begin(folder, job.identity(source))
    files.write_rest(share.rest())  # before the predictions, which may normalise a head in place
    before = Predictions(engine, data.held_out) if with_report else None
    reports = quantize_layers(share, files, progress)
    metrics: dict[str, Any] = {
        "num_layers": len(reports),
        "weight_bytes_before": bytes_before,
        "weight_bytes": engine.executor.weight_bytes,
        "peak_memory_bytes": report.peak_memory_bytes(engine.device) + engine.executor.other_ranks_peak_bytes,
    }
    zeros = num_zeros(full_model, reports) / num_weights
    if layout.pruned:
        metrics["sparsity"] = zeros
    if before is not None:
        if job.quant.has_static_kv_cache:
            engine.run_over(model, share.static_cache(engine.executor.cache))
        metrics |= before.compared_with(engine)
        write_report(folder, job, data.source, reports, metrics)
    sparsity = sparsity_config(full_model, job.quant.sparsity, layout.pruned, zeros)
    config = {"quantization_config": layout.config | sparsity, **layout.tied_mark, **mark_smoothing(job.quant)}
    files.complete(source.checkpoint, share.is_tied, config, engine.dtype)
    return metrics
