"""Quantises the layers of an engine's float model, one after the other, on calibration samples."""

from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig
from models.batch import Batch, KVCache
from pipelines.engine import Engine
from pipelines.engine.batch import whole_batch
from pipelines.engine.kv_cache import allocate_kv_cache
from pipelines.report import ProgressSink
from quantization.calibration import PROBE_TOKENS, SequentialCalibrator
from quantization.kv_scales import place_kv_scales, static_kv_formats
from quantization.part_files import PartFiles
from quantization.quantizer import LinearReport, Quantizer, is_sequential, parts_of
from quantization.scheme import LinearScheme


def quantize_layers(
    engine: Engine,
    config: QuantConfig,
    schemes: dict[str, LinearScheme],
    samples: list[list[int]],
    files: PartFiles,
    progress: ProgressSink,
) -> list[LinearReport]:
    """Quantise all parts of the model in their order and keep each in `files`; those that an earlier run finished are read.

    `schemes`: by the names of the linear layers that are quantised. Raises UserError for what cannot be.
    """
    model = engine.runner.model
    parts = parts_of(model, schemes)
    if config.has_static_kv_cache:
        place_kv_scales(model, per_head=True, found={})
    calibrator = calibrator_of(engine, config, samples)
    quantizer, reports = Quantizer(model, config, calibrator), []
    for i, part in enumerate(parts):
        if files.has(part):
            if part.index < len(model.layers):
                calibrator.observe()
            reports += files.read(part, model)
            if part.index < len(model.layers):
                calibrator.advance()
        else:
            stored, new, folds = quantizer.quantize(part)
            files.write(part, model, stored, new, folds)
            reports += new
        progress.quantized(i + 1, len(parts))
    return reports


def calibrator_of(engine: Engine, config: QuantConfig, samples: list[list[int]]) -> SequentialCalibrator:
    """Return what runs the engine's model over the samples, before its first layer. Raises UserError for samples that are too long."""
    cache = engine.runner.cache
    one_layer = KVCache([cache.layers[0]] * len(cache.layers))  # a batch is one step: layers need not remember
    batches, probe = calibration_batches(engine, samples)
    return SequentialCalibrator(
        engine.runner.model, batches, probe, one_layer, is_sequential(config), config.has_static_kv_cache
    )


def quantize_cache(engine: Engine, format: KVCacheFormat) -> None:
    """Give the engine a cache under the scales that its model has now."""
    model, old = engine.runner.model, engine.runner.cache
    formats = static_kv_formats(model, format)
    cache = allocate_kv_cache(
        model.attention_heads, engine.num_blocks, engine.block_size, formats, old.dtype, engine.device
    )
    engine.run_over(model, cache)


def calibration_batches(engine: Engine, samples: list[list[int]]) -> tuple[list[Batch], Batch]:
    """Return all samples, as many in a batch as a step takes; and the beginning of the first, or all of it where tokens see later ones."""
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
        features = [engine.runner.prompt_features(prompt) for prompt in prompts]
        return engine.runner.on_device(
            whole_batch(prompts, list(map(len, prompts)), tables, features, engine.block_size)
        )

    probe = samples[0] if engine.sees_later_tokens else samples[0][:PROBE_TOKENS]
    return [batch(samples[i : i + num_at_once]) for i in range(0, len(samples), num_at_once)], batch([probe])
