"""`model.prefixes`: soft prefixes in an engine's KV cache, stored once and shared by all rows that name them."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.kv_format import STATIC_MAX, PagedVectors
from models.formats.prefix import Prefix, read_prefix
from pipelines.engine import Engine
from pipelines.engine.batch import prompt_batch
from pipelines.engine.operations import HiddenFrom, Store
from pipelines.engine.request import PlacedPrefix
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.request_settings import RequestSettings

log = logging.getLogger(__name__)


def read_prefixes(paths: Mapping[str, str], plan: ModelPlan, settings: RequestSettings) -> dict[str, Prefix]:
    """Read these prefixes, before the model's weights. Raises UserError for a prefix that does not fit the model."""
    model_type, prefixes = str(plan.source.checkpoint.config.raw("model_type")), dict[str, Prefix]()
    for name, path in paths.items():
        try:
            prefix = read_prefix(Path(path).expanduser(), plan.model, model_type)
        except UserError as error:
            raise UserError(f"model.prefixes.{name}: {error}") from error
        if prefix.num_tokens > (most := settings.context.num_tokens - 2):  # one prompt token and one new token
            problem = f"model.prefixes.{name} has {prefix.num_tokens} virtual tokens"
            raise UserError(f"{problem}, which leaves no room for a prompt ({settings.context}): give at most {most}")
        prefixes[name] = prefix
    return prefixes


def place_prefixes(engine: Engine, prefixes: Mapping[str, Prefix]) -> None:
    """Write the prefixes into pinned blocks of the engine's cache. Raises UserError if there are too few blocks."""
    for name, prefix in prefixes.items():
        num_blocks = -(-prefix.num_tokens // engine.block_size)
        if num_blocks > (num_free := engine.num_free_blocks):
            problem = f"model.prefixes.{name} needs {num_blocks} blocks of the KV cache, but {num_free} are free"
            raise UserError(f"{problem}: raise device.kv_cache_memory, or give fewer prefixes")
        table = engine.pin(num_blocks)
        if prefix.embeddings is None:
            layers = [torch.stack((keys, values)) for keys, values in prefix.layers]
            _write(engine, name, table, _cast(engine, name, torch.stack(layers)))
        else:
            _compute(engine, table, _cast(engine, name, prefix.embeddings))
        placed = PlacedPrefix(prefix.num_tokens, prefix.first_position, prefix.digest, tuple(table))
        engine.requests = replace(engine.requests, prefixes={**engine.requests.prefixes, name: placed})


def _cast(engine: Engine, name: str, values: Tensor) -> Tensor:
    """Return the values in the engine's dtype. Raises UserError for values beyond its range."""
    cast = values.to(engine.device, engine.dtype)
    if not cast.isfinite().all():
        dtype, largest = str(engine.dtype).removeprefix("torch."), values.abs().max().item()
        problem = f"model.prefixes.{name} has numbers up to {largest:.3g}, which model.dtype={dtype} does not reach"
        raise UserError(f"{problem}: give model.dtype=float32 or bfloat16, or another prefix")
    return cast


@torch.inference_mode()
def _write(engine: Engine, name: str, table: list[int], keys_and_values: Tensor) -> None:
    """Store keys and values [L, 2, P, G, D] in the cache's format.

    With ranks, the warning covers only the layers and heads of rank 0.
    """
    places = range(keys_and_values.shape[2])
    slots = [table[i // engine.block_size] * engine.block_size + i % engine.block_size for i in places]
    executor, saturated = engine.executor, []
    executor.run(Store(keys_and_values, slots))
    local_layers = executor.slice_local_layers(keys_and_values)
    for cache, heads, both in zip(
        executor.cache.attention_layers, executor.model.attention_heads, local_layers, strict=True
    ):
        local_heads = heads.slice_keys(both, axis=2)
        saturated += [_saturated(paged, content) for paged, content in zip(cache, local_heads, strict=True)]
    if share := sum(saturated) / len(saturated):
        log.warning("model.prefixes.%s: %.2g %% of it is beyond the static scales of the KV cache", name, 100 * share)


def _saturated(paged: PagedVectors, vectors: Tensor) -> float:
    """Return the share of the vectors' numbers that exceed the range of static scales."""
    if not paged.has_static_scales or paged.scales is None:
        return 0.0
    largest = paged.scales.to(vectors.device) * STATIC_MAX[type(paged.format)]  # [G]
    return float((vectors.float().abs() > largest[:, None]).float().mean())


@torch.inference_mode()
def _compute(engine: Engine, table: list[int], embeddings: Tensor) -> None:
    """Run embeddings [P, E] through the model instead of token embeddings, and keep their keys and values."""
    model = engine.executor.model
    tokens = [0] * len(embeddings)
    batch = prompt_batch([tokens], [1], [table], [model.prompt_features(tokens)], engine.block_size)
    engine.executor.run(HiddenFrom(batch, embeddings))
