"""Quantises the layers of an engine's float model, one after the other, on calibration samples."""

from dataclasses import replace

from conf.errors import UserError
from models.batch import Batch, KVCache
from pipelines.engine import Engine
from pipelines.engine.batch import whole_batch
from pipelines.quantize.share import Share
from pipelines.report import ProgressSink
from quantization.calibration import PROBE_TOKENS
from quantization.part_files import PartFiles
from quantization.quantizer import LinearReport


def quantize_layers(share: Share, files: PartFiles, progress: ProgressSink) -> list[LinearReport]:
    """Quantise all parts of the model in their order and keep each in `files`; those that an earlier run finished are read.

    `share`: that of the process, or rank 0's. Raises UserError for what cannot be.
    """
    reports: list[LinearReport] = []
    for i, part in enumerate(share.parts):
        if files.has(part):
            kept = files.read(part)
            share.pass_over(part)
            share.place(part, kept.tensors)
        else:
            chosen = share.choose(part)
            assert chosen is not None
            kept = replace(chosen, tensors=chosen.tensors | share.place(part, chosen.tensors))
            files.write(part, kept)
        reports += kept.reports
        progress.quantized(i + 1, len(share.parts))
    return reports


def calibration_cache(engine: Engine) -> KVCache:
    """Return the engine's cache for one layer: a batch is one step, so that layers need not remember."""
    return KVCache(engine.executor.cache.layers[:1])


def calibration_batches(engine: Engine, samples: list[list[int]]) -> list[Batch]:
    """Return the beginning of the first sample, or all of it where tokens see later ones; then all samples, as many in a batch as a step
    takes. Raises UserError for samples that are too long.
    """
    longest = max(map(len, samples))
    num_at_once = engine.num_at_once(longest)
    if not num_at_once:
        raise UserError(
            f"a sample of {longest} tokens is more than device.max_batched_tokens, or than the KV cache holds: "
            "give a smaller calibrate.sequence_length"
        )
    width = -(-longest // engine.block_size)  # blocks of a sample

    def batch(prompts: list[list[int]]) -> Batch:
        tables = [list(range(i * width, (i + 1) * width)) for i in range(len(prompts))]
        features = [engine.executor.prompt_features(prompt) for prompt in prompts]
        return engine.executor.on_device(
            whole_batch(prompts, list(map(len, prompts)), tables, features, engine.block_size)
        )

    probe = samples[0] if engine.sees_later_tokens else samples[0][:PROBE_TOKENS]
    return [batch([probe]), *(batch(samples[i : i + num_at_once]) for i in range(0, len(samples), num_at_once))]
