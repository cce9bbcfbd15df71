"""The costs of a model's layers for `parallel=auto`, from config and file headers. One layer of each kind is planned."""

import re
from collections.abc import Hashable
from dataclasses import replace

import torch

from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import ModelConfig, ParallelConfig
from kernels.kv_format import FORMATS, STATIC_FORMATS
from models.causal_lm import CacheContent
from models.layers.attention import Heads
from pipelines.engine.kv_cache import allocate_kv_cache
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.model_source import ModelSource
from pipelines.loading.parallel_costs import ParallelCosts
from pipelines.loading.planning import plan_model
from pipelines.ranks.rank_context import layout_of


def model_costs(
    options: ModelConfig,
    quant: QuantConfig,
    parallel: ParallelConfig,
    source: ModelSource,
    block_size: int,
    packed: bool,
    compresses: bool = False,
) -> tuple[ModelPlan, ParallelCosts]:
    """Return the plan of the model's first layers, which include one of each kind, and the costs of the whole model.

    `source`: opened with `options`. `packed`: as for `plan_model`. `compresses`: as for `ParallelCosts`. Raises UserError
    for a model that is calibrated first.
    """
    if quant.needs_calibration and not source.is_quantized:
        raise UserError(
            "parallel=auto plans no model that is going to be calibrated: quantise it by task=quantize first"
        )
    kinds = _layer_kinds(quant, source)
    num_layers = 1 + max(map(kinds.index, kinds))
    first = replace(source, shape=replace(source.shape, num_hidden_layers=num_layers))
    plan = plan_model(options, quant, first, torch.device("cpu"), packed)

    def block_bytes(heads: Heads) -> int:
        if plan.static_cache is None:
            keys, values = FORMATS[quant.kv_cache.name]
        else:
            keys = values = STATIC_FORMATS[plan.static_cache.name](torch.ones(heads.num_key_value_heads))
        cache = allocate_kv_cache(
            [CacheContent(heads)], 1, block_size, [(keys, values)], plan.dtype, torch.device("meta")
        )
        return sum(tensor.nbytes for tensor in cache.tensors)

    layout = layout_of(0, 1, 1, parallel)
    return plan, ParallelCosts(
        plan.model,
        kinds,
        source.shape.shared_caches,
        plan.dtype,
        block_bytes,
        layout.adds,
        layout.whole_experts,
        compresses,
    )


def _layer_kinds(quant: QuantConfig, source: ModelSource) -> tuple[Hashable, ...]:
    """Return a key per layer. Layers with equal keys have equal names, shapes and dtypes."""
    kinds: tuple[Hashable, ...] = (*zip(source.shape.layer_kinds, source.shape.recurrent_layers, strict=True),)
    if quant.overrides:  # overrides may name a single layer
        return tuple(range(len(kinds)))
    if not (source.has_weights and source.is_quantized):
        return kinds
    tensors_by_layer: list[set[Hashable]] = [set() for _ in kinds]
    for file in source.checkpoint.open_weights({}):
        for name, shape in file.shapes.items():
            number = re.search(r"\.(\d+)(\..*)", name)
            if number and int(number[1]) < len(tensors_by_layer):
                tensors_by_layer[int(number[1])].add((number[2], shape, file.dtypes[name]))
    return tuple(zip(kinds, map(frozenset, tensors_by_layer), strict=True))
