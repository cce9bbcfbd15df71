"""Compare the predictions of a quantised engine with the predictions of the same model in floats."""

from dataclasses import replace

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import RunConfig
from pipelines.engine import Engine, ProbeResult
from pipelines.engine.kv_cache import free_memory
from pipelines.jobs.report import ProgressSink
from pipelines.jobs.scoring import Window, score
from pipelines.loading.assembly import assemble
from pipelines.loading.memory import weight_bytes
from pipelines.loading.model_source import ModelSource
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.calibration_data import built_in_tokens
from pipelines.loading.quantize.job import float_model
from pipelines.loading.request_settings import RequestSettings

NUM_TOKENS = 512
MEMORY_SHARE = 0.8  # of the free memory; the floats of a larger model are not loaded


def measure_divergence(run: RunConfig, source: ModelSource, engine: Engine, progress: ProgressSink) -> ProbeResult:
    """Return the divergence on the first tokens of the built-in texts, at most NUM_TOKENS, and not more than a step takes.

    `engine`: of `run`, with a tokenizer. A second engine of `source` computes with its floats, or with its codes and a
    cache of floats if the checkpoint is quantised. Raises UserError if the free memory is too small for it.
    """
    # Packing takes longer than it saves in one pass, and does not change the bits.
    plan = plan_model(float_model(run.model), QuantConfig(), source, engine.device, packed=False)
    needed, free = weight_bytes(plan.model, plan.dtype), free_memory(engine.device, run.device.memory_fraction)
    if needed > MEMORY_SHARE * free:
        raise UserError(f"the floats have {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free")
    config = engine.config
    settings = RequestSettings(engine.tokenizer, config.context, config.eos_token_ids, config.decode_defaults)
    device = replace(run.device, kv_cache_memory="auto", kept_prefixes=[], kv_cache_tiers=[])
    reference = assemble(plan, device, DecodeConfig(), settings, 1, progress.loaded)
    assert engine.tokenizer is not None
    limits = config.context.num_tokens, config.max_batched_tokens, engine.num_free_blocks * engine.block_size
    token_ids = built_in_tokens(engine.tokenizer, min(NUM_TOKENS, *limits))
    scores = score(engine, [Window(token_ids, len(token_ids) - 1)], reference)
    assert scores.kl_mean is not None
    assert scores.top1_agreement is not None
    return ProbeResult(scores.kl_mean, scores.top1_agreement, scores.num_tokens)
