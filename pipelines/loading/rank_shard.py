"""A worker rank's shard of the model, its KV cache, executor, adapters and quantisation, on which rank 0's operations run."""

from typing import Any, get_args

import torch

from conf.schema import DeviceConfig
from models.batch import KVCache
from pipelines.engine.adapters import AdapterChange, LoadAdapter
from pipelines.engine.executor import Executor, Operation
from pipelines.engine.kv_cache import CacheRoom, free_memory
from pipelines.engine.operations import OPERATIONS
from pipelines.loading.adapter_table import load_as_rank_0, make_adapters
from pipelines.loading.cache_allocation import allocate_cache, room_of
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.quantize.ranks import BeginQuantization, UseStaticCache, share_of
from pipelines.loading.quantize.share import STEPS, Share, Step
from pipelines.loading.rank_operations import Count, MakeExecutor
from pipelines.loading.shard_plan import shard_plan
from pipelines.loading.weight_loading import load_planned
from pipelines.ranks.rank_context import RankContext

OWN_OPERATIONS = MakeExecutor, Count, BeginQuantization, UseStaticCache
OPERATION_TYPES = {kind.__name__: kind for kind in (*OPERATIONS, *STEPS, *get_args(AdapterChange), *OWN_OPERATIONS)}
"""The types of the operations that rank 0 sends, by name."""


class RankShard:
    """The shard of one worker rank, on which it runs rank 0's operations."""

    _executor: Executor
    _share: Share

    def __init__(self, full_plan: ModelPlan, config: DeviceConfig, context: RankContext, rank: str) -> None:
        """Load the shard. `full_plan`: the plan of the unsharded model. `rank`: the worker's name in errors.

        Raises UserError as `shard_plan` and `load_planned` do.
        """
        self._plan = shard_plan(full_plan, context.parallel_layout, context.group, context.neighbours)
        load_planned(self._plan)
        self._config, self._context, self._rank = config, context, rank
        self._adapters = make_adapters(self._plan)
        self._cache: KVCache | None = None

    @property
    def device(self) -> torch.device:
        return self._plan.device

    def room(self) -> CacheRoom:
        """Return this rank's memory for its cache. Raises UserError as `cache_room` does."""
        free = free_memory(self._plan.device, self._config.memory_fraction)
        return room_of([self._plan], self._config, free, self._context.size, self._context.num_sharing)

    def run(self, operation: Any) -> Any:
        """Run an operation of OPERATION_TYPES, and return its result."""
        match operation:
            case Operation():
                return operation.compute(self._executor)
            case Step():
                return operation.compute(self._share)
            case MakeExecutor():
                self._make_executor(operation)
            case BeginQuantization():
                assert self._cache is not None
                batches = [self._executor.on_device(batch) for batch in operation.batches]
                self._share = share_of(
                    operation, self._plan, batches, self._cache.one_of_each_shape(), self._context.group
                )
            case UseStaticCache():
                assert self._cache is not None
                self._cache = self._share.static_cache(self._cache)
            case LoadAdapter():
                return load_as_rank_0(self._adapters, operation, self._rank)
            case _:
                self._adapters.repeat(operation, self._rank)
        return None

    def _make_executor(self, operation: MakeExecutor) -> None:
        if self._cache is None:
            sizes = operation.num_blocks, operation.num_state_slots, operation.num_window_blocks
            self._cache = allocate_cache(self._plan, self._config, *sizes)
        graphs, width = operation.num_graph_sequences, operation.table_width
        self._executor = Executor(self._plan.model, self._cache, graphs, width, self._config.decode_threads)
