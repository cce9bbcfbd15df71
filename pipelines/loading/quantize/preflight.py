"""The plan of a quantisation, with estimates of memory and time. `quantize.dry_run=true` only prints it."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from conf.quantization import QuantConfig
from models.linear_layers import linear_specs
from pipelines.jobs.report import print_table
from pipelines.loading.device import prepare_device
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.model_source import ModelSource
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.calibration_data import CalibrationData, read_calibration_data
from pipelines.loading.quantize.estimate import expected_seconds
from pipelines.loading.quantize.job import QuantizeJob
from pipelines.loading.request_settings import RequestSettings, read_request_settings
from pipelines.loading.shard_plan import check_plan
from pipelines.ranks.launch import degrees, joined
from pipelines.ranks.rank_context import layout_of
from quantization.file_layout import FileLayout, file_layout


@dataclass(frozen=True)
class Preflight:
    plan: ModelPlan
    """Plan of the float model."""
    layout: FileLayout
    data: CalibrationData
    duration: str
    """Expected duration on this machine: `about 8 s`."""


def preflight(
    job: QuantizeJob, source: ModelSource, settings: RequestSettings, folder: Path, with_report: bool
) -> Preflight:
    """Return the plan of a quantisation. Raises UserError as quantising does.

    Reads only file headers, the device, layer shapes and the texts. The time is measured with files in `folder`, where
    the model will be. `with_report`: include the time of the report.
    """
    device = prepare_device(job.device)  # sets the threads for the time estimate
    plan = plan_model(job.model, QuantConfig(), source, device, packed=False)
    layout = file_layout(plan.model, job.quant, job.format)
    are_prompts = source.shape.capabilities.needs_whole_prompt
    data = read_calibration_data(job.calibrate, settings.tokenizer, settings.context.num_tokens, are_prompts)
    if job.parallel.mode.divides:
        tp, pp = degrees(job.parallel, joined(os.environ))
        check_plan(plan, layout_of(0, tp, pp, job.parallel))
    if device.type != "cpu" or job.parallel.mode.divides:
        where = "on a CPU" if device.type != "cpu" else "for one process"
        return Preflight(plan, layout, data, f"a time that is only known {where}")
    seconds = expected_seconds(job, plan, settings, layout, data, folder, with_report)
    return Preflight(plan, layout, data, f"about {seconds:,.0f} s")


def print_preflight(job: QuantizeJob, source: ModelSource, folder: Path) -> None:
    """Print the plan of a quantisation. Raises UserError as `preflight` does."""
    ready = preflight(job, source, read_request_settings(job.model, source), folder, with_report=True)
    model, schemes, itemsize = ready.plan.model, ready.layout.schemes, ready.plan.dtype.itemsize
    layers = linear_specs(model)
    sizes = {name: layers[name].shape[0] * layers[name].shape[1] for name in schemes}
    before = sum(parameter.numel() for parameter in model.parameters()) * itemsize
    saved = sum(size * (itemsize - schemes[name].weights.bits / 8) for name, size in sizes.items())  # scales are small
    largest = max(sizes.values(), default=0)
    counts = Counter(str(scheme) for scheme in schemes.values())
    cache = [("KV cache", f"{job.quant.kv_cache.name}, a scale for each head")] if job.quant.has_static_kv_cache else []
    print_table(
        [
            *((f"{count} layers", scheme) for scheme, count in counts.items()),
            *cache,
            *([(f"{len(ready.layout.pruned)} layers", f"pruned: {job.quant.sparsity}")] if ready.layout.pruned else ()),
            ("stay floats", ", ".join(sorted(layers.keys() - schemes.keys())) or "no linear layer"),
            ("weights", f"{before / 1e6:,.1f} MB before, {(before - saved) / 1e6:,.1f} MB after"),
            ("memory", f"about {(before + 3 * 4 * largest) / 1e6:,.0f} MB for weights while it runs in one process"),
            ("time", f"{ready.duration} on this machine"),
        ]
    )
