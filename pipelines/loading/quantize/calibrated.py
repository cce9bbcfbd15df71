"""The calibrated model of a run: an earlier run has made it, or it is made now, before an engine is built."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from conf.errors import UserError
from conf.quantization import (
    Activations,
    CalibrateConfig,
    KVCacheFormat,
    QuantConfig,
    QuantizeConfig,
    QuantMethod,
    QuantScheme,
)
from conf.schema import ExpertPlacement, ParallelConfig, RunConfig, Sum
from models.formats.manifest import MANIFEST
from models.heads import HeadKind
from pipelines.jobs.output_folder import kept_folder, only_maker
from pipelines.jobs.report import ProgressSink
from pipelines.loading.device import prepare_device
from pipelines.loading.model_source import ModelSource, ReadyModel, replace_model_path, resolve_model
from pipelines.loading.quantize.job import QuantizeJob, float_model
from pipelines.ranks.launch import joined

log = logging.getLogger(__name__)


def calibrated(run: RunConfig, source: ModelSource, progress: ProgressSink) -> ReadyModel:
    """Return the calibrated model of `run`, or the model in `source` if the scheme needs no calibration.

    Raises UserError for options of calibration that are not used, and for a model that cannot be calibrated.
    """
    if not run.quant.needs_calibration:
        return ReadyModel(source, run.model, run.quant)
    if source.is_quantized:
        if (run.calibrate, run.quantize) != (CalibrateConfig(), QuantizeConfig()):
            unused = "calibrate and quantize.format are not used by a model that is quantised already"
            raise UserError(f"{unused}: leave them out, or give the float model")
        return ReadyModel(source, run.model, run.quant)
    if source.architecture.head is not HeadKind.vocabulary:
        problem = f"quant={run.quant.scheme.name} needs calibration, and calibration needs a head for the vocabulary"
        remedy = "give a scheme without it, such as quant=int8, or quantise the model with that head by task=quantize"
        raise UserError(f"{problem}: {remedy}")
    job = calibration_job(run)
    if not run.quant.has_static_kv_cache:  # static scales need files, and files cannot hold ggml blocks
        job = _with_files(job, run.calibrate, source, progress)
        if not job.quant.needs_calibration:
            return ReadyModel(source, run.model, job.quant)
    folder = find_or_make(job, source, progress)
    log.warning("what runs is the calibrated model in %s", folder)
    found_when_run = KVCacheFormat.none if run.quant.has_static_kv_cache else run.quant.kv_cache
    model, quant = replace_model_path(run.model, folder), QuantConfig(kv_cache=found_when_run)
    quant = replace(quant, block_activations=run.quant.block_activations)
    if run.quant.activations is Activations.auto:  # the model's files do not store this setting either
        quant = replace(quant, activations=Activations.auto)
    return ReadyModel(resolve_model(model), model, quant)


def _with_files(
    job: QuantizeJob, calibrate: CalibrateConfig, source: ModelSource, progress: ProgressSink
) -> QuantizeJob:
    """Return the job with the files of its importance matrix and of its plan, which are found or made."""
    quant = job.quant
    if quant.method is QuantMethod.imatrix and quant.imatrix is None:
        weighted = QuantConfig(QuantScheme.q4_k, QuantMethod.imatrix)
        file = find_or_make_imatrix(replace(job, calibrate=calibrate.resolved(weighted)), source, progress)
        quant = replace(quant, imatrix=str(file))
    if quant.scheme is QuantScheme.auto and quant.plan is None:
        plan_file = find_or_make_plan(replace(job, quant=quant), source, progress)
        quant = replace(quant, bits=None, max_bytes=None, plan=str(plan_file))
    return replace(job, quant=quant)


def calibration_job(run: RunConfig) -> QuantizeJob:
    calibrate, parallel = run.calibrate.resolved(run.quant), _for_calibration(run.parallel)
    device = replace(run.device, kept_prefixes=[], kv_cache_tiers=[])  # calibration computes no rows
    return QuantizeJob(float_model(run.model), run.quant, calibrate, run.quantize.format, parallel, device)


def _for_calibration(parallel: ParallelConfig) -> ParallelConfig:
    """Return the parallel settings of the calibration.

    Under a launcher one process calibrates and the other ranks wait.
    """
    if joined(os.environ) is not None:
        return ParallelConfig()
    return replace(parallel, sum=Sum.gather, experts=ExpertPlacement.split)


def find_or_make(job: QuantizeJob, source: ModelSource, progress: ProgressSink) -> Path:
    """Return the folder of the model that `job` makes of `source`.

    Makes it if it does not exist.

    Does not measure quality, because that takes longer than a short calibration. Only task=quantize measures quality.
    Raises UserError.
    """
    from pipelines.loading.quantize.model import make_model  # here, because other runs do not calibrate

    target = job.default_target(source)
    if (target / MANIFEST).is_file():
        return target
    with only_maker(target):
        if not (target / MANIFEST).is_file():  # another process may have made it meanwhile
            make_model(job, source, target, progress, with_report=False)
    return target


def find_or_make_plan(job: QuantizeJob, source: ModelSource, progress: ProgressSink) -> Path:
    """Return the file with the formats that quant=auto chooses for `source`. Makes it if it does not exist."""
    from pipelines.loading.quantize.sensitivity import write_auto_plan  # here, because other runs do not measure

    target = kept_folder("plans") / f"{job.default_target(source).name}.yaml"
    return _find_or_write(target, lambda: write_auto_plan(job, source, prepare_device(job.device), target, progress))


def find_or_make_imatrix(job: QuantizeJob, source: ModelSource, progress: ProgressSink) -> Path:
    """Return the file with the importance matrix of `source`. Makes it if it does not exist."""
    from pipelines.loading.quantize.importance import write_importance  # here, because other runs do not collect it

    target = job.imatrix_target(source)
    return _find_or_write(target, lambda: write_importance(job, source, prepare_device(job.device), target, progress))


def _find_or_write(target: Path, write: Callable[[], None]) -> Path:
    if not target.is_file():
        with only_maker(target):
            if not target.is_file():  # another process may have made it meanwhile
                write()
    return target
