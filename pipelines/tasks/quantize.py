"""`task=quantize`: prune or quantise a model layer by layer, with a report of the loss of quality.

A run that ended early is resumed by the next run of the same model, settings and texts: finished layers are kept.
"""

import json
import logging
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.errors import UserError, check
from conf.quantization import BlockActivations, KVCacheFormat, QuantConfig, QuantizedFormat, QuantScheme
from conf.schema import RunConfig
from pipelines.jobs import report
from pipelines.jobs.output_folder import kept_folder, only_maker, refuse_existing
from pipelines.loading.model_source import resolve_model
from pipelines.loading.quantize.job import QuantizeJob, float_model
from pipelines.loading.quantize.model import make_model
from pipelines.loading.quantize.preflight import print_preflight
from pipelines.loading.quantize.report import perplexity

log = logging.getLogger(__name__)


def run_quantize(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Quantise the model. Raises UserError if it cannot be quantised; finished layers are kept for the next run."""
    run.decode.check_unset("by task=quantize", "leave it out")
    kv_cache, is_static, activations = run.quant.kv_cache, run.quant.has_static_kv_cache, run.quant.activations
    allowed = "int8, int4, a8w8, fp8, mxfp4 or nvfp4 with task=quantize, quant.kv_cache_scales=static, or a quant.sparsity.method"
    changes_weights = run.quant.scheme is not QuantScheme.none or run.quant.sparsity.prunes
    check(is_static or changes_weights, "quant", "none", allowed)
    later = "with task=quantize and give it when the model is used"
    check(not run.model.keep_packed, "model.keep_packed", "true", f"false {later}")
    allowed = f"none {later}, or quant.kv_cache_scales=static"
    check(is_static or kv_cache is KVCacheFormat.none, "quant.kv_cache", kv_cache.name, allowed)
    check(activations is activations.in_files, "quant.activations", activations.name, f"none {later}")
    in_blocks = run.quant.block_activations
    check(in_blocks is BlockActivations.int8, "quant.block_activations", in_blocks.name, f"int8 {later}")
    source = resolve_model(run.model)
    if source.is_quantized:
        raise UserError(f"model.path={run.model.path} is quantised already: give the float model that it was made of")
    run = replace(run, calibrate=run.calibrate.resolved(run.quant), quant=_for_format(run.quant, run.quantize.format))
    job = _job(run)
    output = run.quantize.output
    output_folder = None if output is None else Path(os.path.abspath(Path(output).expanduser()))
    if run.quantize.dry_run:
        print_preflight(job, source, output_folder.parent if output_folder else kept_folder("quantized"))
        return
    start, target = time.perf_counter(), output_folder or job.default_target(source)
    refuse_existing(target, run.quantize.overwrite, "quantize")
    with nullcontext() if output_folder else only_maker(target), report.progress_bar() as progress:
        refuse_existing(target, run.quantize.overwrite, "quantize")  # another run may have made it meanwhile
        metrics = make_model(job, source, target, progress, True, run.quantize.overwrite)
    metrics |= {"quantize_s": time.perf_counter() - start}
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, target, output_dir)


def default_folder(run: RunConfig) -> Path:
    """Return the folder that a run without quantize.output makes. `run`: of its config.yaml. Raises UserError."""
    return _job(run).default_target(resolve_model(run.model))


def _job(run: RunConfig) -> QuantizeJob:
    model = float_model(run.model)
    return QuantizeJob(model, run.quant, run.calibrate, run.quantize.format, run.parallel, run.device)


def _for_format(quant: QuantConfig, format: QuantizedFormat) -> QuantConfig:
    """Return the settings, without the head's scheme in conf/quant/int4.yaml if the format has no quantised head."""
    if format is not QuantizedFormat.awq or quant.overrides != {"lm_head": "int8"}:
        return quant
    log.warning("quantize.format=awq has no quantised head: lm_head stays as it is, and not int8")
    return replace(quant, overrides={}, skip=[*quant.skip, "lm_head"])


def _print(metrics: dict[str, Any], target: Path, output_dir: Path) -> None:
    report.print_table(
        [
            ("layers", f"{metrics['num_layers']:,}"),
            (
                "weights",
                f"{metrics['weight_bytes_before'] / 1e6:,.1f} MB before, {metrics['weight_bytes'] / 1e6:,.1f} MB now",
            ),
            *(
                [("zeros", f"{metrics['sparsity']:.1%} of all weights, in the pruned layers")]
                if "sparsity" in metrics
                else ()
            ),
            (
                "perplexity",
                f"{perplexity(metrics['perplexity_before'])} before, {perplexity(metrics['perplexity'])} now",
            ),
            ("KL divergence", f"{metrics['kl_mean']:.3g}"),
            ("equal most likely tokens", f"{metrics['top1_agreement']:.2%}"),
            ("time", f"{metrics['quantize_s']:.1f} s"),
            ("peak memory", f"{metrics['peak_memory_bytes'] / 1e6:,.0f} MB"),
        ]
    )
    print(f"model: {target}")
    print(f"output: {output_dir}")
