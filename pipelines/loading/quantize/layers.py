"""Quantise the layers of an engine's float model in order, on calibration samples."""

from dataclasses import replace
from itertools import chain

from conf.errors import UserError
from conf.quantization import QuantConfig
from models.batch import Batch
from pipelines.engine import Engine
from pipelines.engine.batch import prompt_batch
from pipelines.jobs.report import ProgressSink
from pipelines.loading.quantize.share import Choose, PassOver, PlaceTensors, Share
from quantization.calibration import PROBE_TOKENS
from quantization.file_layout import FileLayout
from quantization.part_files import PartFiles
from quantization.quantizer import LinearReport


def quantize_layers(share: Share, files: PartFiles, progress: ProgressSink) -> list[LinearReport]:
    """Quantise all parts of the model in order and keep each in `files`. Parts of an earlier run are read.

    `share`: the process's share, or rank 0's. Raises UserError if a part cannot be quantised.
    """
    reports: list[LinearReport] = []
    progress.quantized(0, len(share.parts))
    for i, part in enumerate(share.parts):
        if files.has(part):
            quantized = files.read(part)
            share.run(PassOver(part.index))
            share.run(PlaceTensors(part.index, quantized.tensors))
        else:
            chosen = share.run(Choose(part.index))
            assert chosen is not None
            quantized = replace(chosen, tensors=chosen.tensors | share.run(PlaceTensors(part.index, chosen.tensors)))
            files.write(part, quantized)
        reports += quantized.reports
        progress.quantized(i + 1, len(share.parts))
    return reports


def whole_share(quant: QuantConfig, layout: FileLayout, engine: Engine, samples: list[list[int]]) -> Share:
    """Return the share of a process that has the whole float model, the engine's."""
    batches, cache = calibration_batches(engine, samples), engine.executor.cache.one_of_each_shape()
    return Share(quant, layout, engine.executor.model, batches, cache)


def calibration_batches(engine: Engine, samples: list[list[int]]) -> list[Batch]:
    """Return a batch with the start of the first sample, then batches of all samples, each as large as a step.

    If tokens see later tokens, the first batch holds the whole first sample. Raises UserError for samples that are too
    long.
    """
    longest = max(map(len, samples))
    num_at_once = engine.num_at_once(longest)
    if not num_at_once:
        raise UserError(
            f"a sample of {longest} tokens is more than device.max_batched_tokens, or than the KV cache holds: "
            "give a smaller calibrate.sequence_length"
        )
    width = -(-longest // engine.block_size)  # blocks per sample
    sizes = engine.block_size, engine.capabilities.is_recurrent

    def batch(prompts: list[list[int]]) -> Batch:
        engine.requests.check_ids("token id of the calibration texts", chain.from_iterable(prompts))
        tables = [list(range(i * width, (i + 1) * width)) for i in range(len(prompts))]
        features = [engine.executor.prompt_features(prompt) for prompt in prompts]
        return engine.executor.on_device(prompt_batch(prompts, list(map(len, prompts)), tables, features, *sizes))

    probe = samples[0] if engine.capabilities.needs_whole_prompt else samples[0][:PROBE_TOKENS]
    return [batch([probe]), *(batch(samples[i : i + num_at_once]) for i in range(0, len(samples), num_at_once))]
