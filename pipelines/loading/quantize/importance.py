"""Collect the importance matrix of a float model on calibration texts (quant.method=imatrix)."""

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from conf.decoding import DecodeConfig
from conf.quantization import QuantConfig, QuantMethod, QuantScheme
from models.causal_lm import CausalLM
from models.formats.gguf.imatrix import Floats, write_imatrix
from models.linear_layers import linear_specs
from pipelines.jobs.report import ProgressSink
from pipelines.loading.assembly import assemble
from pipelines.loading.model_source import ModelSource
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.calibration_data import read_calibration_data
from pipelines.loading.quantize.job import QuantizeJob
from pipelines.loading.quantize.layers import calibration_batches
from pipelines.loading.request_settings import read_request_settings
from quantization.calibration import SequentialCalibrator, Statistics
from quantization.importance import find_entry_rows

log = logging.getLogger(__name__)

SQUARES = Statistics(ranges=False)


def write_importance(
    job: QuantizeJob, source: ModelSource, device: torch.device, target: Path, progress: ProgressSink
) -> None:
    """Run the float model of `source` over the calibration texts, and write its importance matrix into `target`.

    Raises UserError as `plan_model` does for `job.quant`, and for texts that cannot be read.
    """
    if job.quant.scheme is not QuantScheme.auto:
        plan_model(job.model, replace(job.quant, method=QuantMethod.rtn), source, device, packed=False)
    plan = plan_model(job.model, QuantConfig(), source, device, packed=False)
    rows = find_entry_rows(plan.model, source.checkpoint.config.require("model_type", str))
    settings = read_request_settings(job.model, source)
    are_prompts = source.shape.capabilities.needs_whole_prompt
    data = read_calibration_data(job.calibrate, settings.tokenizer, settings.context.num_tokens, are_prompts)
    what = "collecting the importance matrix on %d samples of at most %d tokens, from %s"
    log.warning(what, len(data.samples), job.calibrate.sequence_length, data.source)
    with progress.calibrating():
        engine = assemble(plan, job.device, DecodeConfig(), settings, 1, progress.loaded)
        probe, *batches = calibration_batches(engine, data.samples)
        model = engine.executor.model
        calibrator = SequentialCalibrator(
            model, batches, probe, engine.executor.cache.one_of_each_shape(), sequential=False
        )
        sums = _collect(model, calibrator, progress)
    num_rows, specs = Counter(row.name for row in rows.values()), linear_specs(model)
    entries: dict[str, tuple[Floats, Floats]] = {}
    for layer, row in rows.items():
        if layer not in sums and num_rows[row.name] == 1:
            continue
        if row.name not in entries:  # an expert that no token reaches has zeros
            shape = num_rows[row.name], specs[layer].shape[1]
            entries[row.name] = np.zeros(shape, np.float32), np.zeros(shape[0], np.float32)
        if layer in sums:
            squares, count = sums[layer]
            entries[row.name][0][row.index], entries[row.name][1][row.index] = squares, count
    dataset = job.calibrate.data or "built-in texts"
    write_imatrix(target, entries, dataset, len(data.samples), max(map(len, data.samples)))
    log.warning("the importance matrix is in %s: quant.imatrix=FILE uses it again", target)


def _collect(
    model: CausalLM, calibrator: SequentialCalibrator, progress: ProgressSink
) -> dict[str, tuple[Floats, int]]:
    """Return, by linear layer, the sum of squares of each input channel and the number of tokens, if any."""
    sums: dict[str, tuple[Floats, int]] = {}
    specs, num_layers = linear_specs(model), len(model.layers)
    for index in range(num_layers):
        prefix = f"{model.layout.layers}.{index}."
        linears = [name.removeprefix(prefix) for name in specs if name.startswith(prefix)]
        for group in calibrator.observe(linears, SQUARES):
            sums |= {f"{prefix}{name}": (group.squares.cpu().numpy(), group.num_rows) for name in group.linears}
        calibrator.advance()
        progress.quantized(index + 1, num_layers)
    if model.layout.head in specs:
        group = calibrator.observe_head([model.layout.head], SQUARES)
        sums[model.layout.head] = group.squares.cpu().numpy(), group.num_rows
    return sums
