"""Estimate the duration of a quantisation: measure one layer of each kind (`first_layers.py`)."""

import math
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from conf.quantization import QuantConfig
from pipelines.engine import Engine
from pipelines.engine.operations import finite_logits
from pipelines.loading.fingerprint import sha256_of
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.quantize.calibration_data import CalibrationData
from pipelines.loading.quantize.first_layers import first_layers
from pipelines.loading.quantize.job import QuantizeJob
from pipelines.loading.quantize.layers import whole_share
from pipelines.loading.quantize.report import measured_texts
from pipelines.loading.quantize.share import Choose, PlaceTensors
from pipelines.loading.request_settings import RequestSettings
from quantization.calibration import NUM_SAMPLES
from quantization.file_layout import FileLayout
from quantization.part_files import REST, PartFiles

START_S = 3.0  # imports, and tokenizing the texts
REPORT_S = 2.0  # to draw the picture
READ_BYTES = 2**26  # bytes of the checkpoint that are read for the measurement: larger than any cache


@dataclass(frozen=True)
class PartCost:
    """Measured time of a part, in seconds."""

    per_token: float
    """Seconds per token to observe the part and to advance."""
    fixed: float
    """Seconds to choose the part's codes, to place them and to write them."""


@dataclass(frozen=True)
class PredictionCost:
    """Seconds of one held-out text of the report."""

    layers: float
    head: float


def expected_seconds(
    job: QuantizeJob,
    plan: ModelPlan,
    settings: RequestSettings,
    layout: FileLayout,
    data: CalibrationData,
    folder: Path,
    with_report: bool,
) -> float:
    """Return the estimated seconds to quantise a planned float model, including this estimate.

    It writes temporary files near `folder`. `with_report`: include the time of the report.
    """
    start, model = time.perf_counter(), plan.model
    first = first_layers(job.device, plan, settings, layout)
    engine = first.engine
    samples = _folded(data.samples, engine)
    text = _folded(measured_texts(data.held_out, engine.capabilities.needs_whole_prompt), engine)[0]
    with TemporaryDirectory(dir=next(place for place in (folder, *folder.parents) if place.is_dir())) as scratch:
        files = PartFiles(Path(scratch))
        keep_rest = _seconds_to_keep_rest(engine, files)
        before = _predict(engine, text)
        costs = _measure(job.quant, engine, files, first.layout, samples)
        after = _predict(engine, text)
    num_tokens, head_share = sum(map(len, data.samples)), model.config.vocab_size / engine.vocab_size
    layers = [costs[kind] for kind in first.kinds]
    seconds = START_S + _seconds_to_read(plan) + keep_rest * head_share
    seconds += sum(cost.fixed + num_tokens * cost.per_token for cost in layers)
    if first.has_head:
        seconds += num_tokens * costs[-1].per_token + head_share * costs[-1].fixed
    if with_report:
        num_texts, depth = len(data.held_out), len(layers) / engine.executor.model.config.num_hidden_layers
        predictions = (depth * cost.layers + head_share * cost.head for cost in (before, after))
        seconds += REPORT_S + num_texts * sum(predictions)
    return seconds + time.perf_counter() - start


def _folded(texts: list[list[int]], engine: Engine) -> list[list[int]]:
    """Return the first texts, about NUM_SAMPLES tokens in all, with ids within the engine's vocabulary.

    Searches read about NUM_SAMPLES tokens, so their time does not grow with the number of tokens.
    """
    folded: list[list[int]] = []
    for text in texts:
        if sum(map(len, folded)) < NUM_SAMPLES:
            folded.append([token_id % engine.vocab_size for token_id in text])
    return folded


def _measure(
    quant: QuantConfig, engine: Engine, files: PartFiles, layout: FileLayout, samples: list[list[int]]
) -> list[PartCost]:
    costs, num_tokens = [], sum(map(len, samples))
    share = whole_share(quant, layout, engine, samples)
    for part in share.parts:
        start, growing = time.perf_counter(), -share.calibrator.batch_seconds
        chosen = share.run(Choose(part.index))
        assert chosen is not None
        share.run(PlaceTensors(part.index, chosen.tensors))
        files.write(part, chosen)
        sha256_of(files.path_of(part))
        growing += share.calibrator.batch_seconds
        costs.append(PartCost(growing / num_tokens, time.perf_counter() - start - growing))
    return costs


def _seconds_to_keep_rest(engine: Engine, files: PartFiles) -> float:
    start, layers = time.perf_counter(), f"{engine.executor.model.layout.layers}."
    files.write_rest(
        {name: tensor.data for name, tensor in engine.executor.model.named_parameters() if not name.startswith(layers)}
    )
    sha256_of(files.folder / REST)
    return time.perf_counter() - start


@torch.inference_mode()
def _predict(engine: Engine, text: list[int]) -> PredictionCost:
    start = time.perf_counter()
    hidden = engine.hidden_states([text], [len(text)])
    middle = time.perf_counter()
    finite_logits(engine.executor, hidden).float().log_softmax(-1)
    return PredictionCost(middle - start, time.perf_counter() - middle)


def _seconds_to_read(plan: ModelPlan) -> float:
    """Return the seconds to read and check the whole checkpoint, estimated from its first tensors."""
    size = sum(math.prod(file.shapes[n]) * file.dtypes[n].itemsize for file in plan.files for n in file.shapes)
    done, start = 0, time.perf_counter()
    for _, tensor in chain.from_iterable(file.read(file.shapes) for file in plan.files):
        copied = tensor.to(plan.dtype, copy=True)
        copied.amax().isnan(), copied.sum(dtype=torch.float32).isfinite()
        done += tensor.nbytes
        if done >= READ_BYTES:
            break
    return (time.perf_counter() - start) * size / done if done else 0.0
