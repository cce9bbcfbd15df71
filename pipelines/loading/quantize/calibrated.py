"""The calibrated model of a run: an earlier run has made it, or it is made now."""

import logging
import os
from dataclasses import replace
from pathlib import Path

from conf.errors import UserError
from conf.quantization import Activations, CalibrateConfig, KVCacheFormat, QuantConfig, QuantizeConfig
from conf.schema import ExpertPlacement, ParallelConfig, RunConfig, Sum
from models.formats.manifest import MANIFEST
from models.heads import HeadKind
from pipelines.jobs.output_folder import only_maker
from pipelines.jobs.report import ProgressSink
from pipelines.loading.model_source import ModelSource, moved, resolve_model
from pipelines.loading.quantize.job import default_target
from pipelines.ranks.launch import joined

log = logging.getLogger(__name__)


def calibrated(run: RunConfig, source: ModelSource, progress: ProgressSink) -> tuple[RunConfig, ModelSource]:
    """Return the run and the checkpoint of the calibrated model; unchanged if the scheme needs no calibration."""
    if run.quant.needs_calibration and source.is_quantized:
        if (run.calibrate, run.quantize) != (CalibrateConfig(), QuantizeConfig()):
            unused = "calibrate and quantize.format are not used by a model that is quantised already"
            raise UserError(f"{unused}: leave them out, or give the float model")
    elif run.quant.needs_calibration:
        if source.architecture.head is not HeadKind.vocabulary:
            what = f"quant={run.quant.scheme.name} needs calibration, which a model without the vocabulary's head has none of"
            remedy = (
                "give a scheme without it, such as quant=int8, or quantise the model with that head by task=quantize"
            )
            raise UserError(f"{what}: {remedy}")
        folder = find_or_make(run, source, progress)
        log.warning("what runs is the calibrated model in %s", folder)
        found_when_run = KVCacheFormat.none if run.quant.has_static_kv_cache else run.quant.kv_cache
        model, quant = moved(run.model, folder), QuantConfig(kv_cache=found_when_run)
        if run.quant.activations is Activations.auto:  # the model's files do not store this setting either
            quant = replace(quant, activations=Activations.auto)
        run = replace(run, model=model, quant=quant, calibrate=CalibrateConfig(), quantize=QuantizeConfig())
        source = resolve_model(run.model)
    return run, source


def find_or_make(run: RunConfig, source: ModelSource, progress: ProgressSink) -> Path:
    """Return the folder of the model that `quant` makes of `source` on the texts of `calibrate`.

    Makes it if it does not exist.

    Measures no quality, which takes longer than a short calibration; only task=quantize does. Raises UserError.
    """
    from pipelines.loading.quantize.model import make_model  # here, because other runs do not calibrate

    run = replace(run, calibrate=run.calibrate.resolved(run.quant), parallel=_for_calibration(run.parallel))
    target = default_target(run, source)
    if (target / MANIFEST).is_file():
        return target
    with only_maker(target):
        if not (target / MANIFEST).is_file():  # another process may have made it meanwhile
            make_model(run, source, target, progress, with_report=False)
    return target


def _for_calibration(parallel: ParallelConfig) -> ParallelConfig:
    """Return the parallel settings of the calibration.

    Under a launcher one process calibrates and the other ranks wait.
    """
    if joined(os.environ) is not None:
        return ParallelConfig()
    return replace(parallel, sum=Sum.gather, experts=ExpertPlacement.split)
