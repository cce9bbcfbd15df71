"""From a RunConfig to an engine. A scheme that needs calibration is calibrated first, once: its model is kept and found again."""

import logging
from dataclasses import replace

from conf.errors import UserError
from conf.quantization import Activations, CalibrateConfig, KVCacheFormat, QuantConfig, QuantizeConfig
from conf.schema import RunConfig
from pipelines.assembly import assemble, is_quantized
from pipelines.engine import Engine
from pipelines.report import NO_PROGRESS, ProgressSink

log = logging.getLogger(__name__)


def load_engine(run: RunConfig, max_num_requests: int, progress: ProgressSink = NO_PROGRESS) -> Engine:
    """An engine for so many requests at once. Raises UserError as `assemble` and `find_or_make` do."""
    if run.quant.needs_calibration and is_quantized(run.model):
        if (run.calibrate, run.quantize) != (CalibrateConfig(), QuantizeConfig()):
            unused = "calibrate and quantize.format are not used by a model that is quantised already"
            raise UserError(f"{unused}: leave them out, or give the float model")
    elif run.quant.needs_calibration:
        from pipelines.quantize import find_or_make  # here, because other runs have nothing to calibrate

        folder = find_or_make(run, progress)
        log.warning("what runs is the calibrated model in %s", folder)
        found_when_run = KVCacheFormat.none if run.quant.has_static_kv_cache else run.quant.kv_cache
        model, quant = replace(run.model, path=str(folder)), QuantConfig(kv_cache=found_when_run)
        if run.quant.activations is Activations.auto:  # which is not in the model's files, either
            quant = replace(quant, activations=Activations.auto)
        run = replace(run, model=model, quant=quant, calibrate=CalibrateConfig(), quantize=QuantizeConfig())
    return assemble(run, max_num_requests, progress.loaded)
