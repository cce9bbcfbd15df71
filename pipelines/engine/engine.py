"""The engine: requests in, outputs out. `StepLoop` runs the steps."""

import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from conf.decoding import DecodeConfig
from models.batch import KVCache
from models.causal_lm import CausalLM
from models.tokenizers import Tokenizer
from pipelines.engine.adapters import Adapters
from pipelines.engine.block_manager import BlockManager, BlockTiers
from pipelines.engine.engine_config import EngineConfig
from pipelines.engine.executor import Executor
from pipelines.engine.faults import belongs_to_request
from pipelines.engine.kv_cache import state_manager_of, window_blocks_of
from pipelines.engine.request import Output, Pooling, Request, SequenceGroup, Sink
from pipelines.engine.request_factory import RequestFactory
from pipelines.engine.scheduler import Scheduler
from pipelines.engine.sequence_groups import begin_group
from pipelines.engine.step_loop import StepLoop


@dataclass(frozen=True)
class ProbeResult:
    """The differences between the predictions of a quantised model and of the same model in floats."""

    kl_mean: float
    """Mean KL(floats || quantised) of a token, in nats."""
    top1_agreement: float
    """Share of tokens for which both have the same most likely token."""
    num_tokens: int


class Engine(StepLoop):
    """Runs requests over one model and one pool of KV blocks. Not thread-safe.

    >>> requests = [engine.request(0, [1, 403, 407], DecodeConfig(max_new_tokens=8))]
    >>> [output.completions[0].token_ids for output in engine.generate(requests)]
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        adapters: Adapters | None = None,
        make_executor: Callable[[CausalLM, KVCache, int, int, int | None], Executor] = Executor,
    ) -> None:
        """`adapters`: the model's adapters that requests can name.

        `make_executor`: Executor, or a factory with the same arguments for an executor that runs the model with other
        ranks.
        """
        self.num_blocks, block_size = cache.num_blocks, cache.block_size
        self.device, self.dtype = cache.device, cache.dtype
        self.config, self.tokenizer = config, tokenizer
        self.divergence: ProbeResult | None = None  # None if it is not measured
        vocab_size, self.capabilities = model.config.vocab_size, model.config.capabilities
        state_manager = state_manager_of(cache, self.capabilities.is_recurrent)
        windows = window_blocks_of(cache, model.longest_window, config.max_batched_tokens)
        sizes = self.num_blocks, block_size, state_manager.num_slots, windows.max_sequences
        self.requests = RequestFactory(tokenizer, vocab_size, self.capabilities, config, *sizes)
        self.adapters = adapters or Adapters(model, self.dtype, self.device)
        scheduler = Scheduler(
            BlockManager(self.num_blocks, block_size),
            config.max_num_requests,
            config.max_batched_tokens,
            self.capabilities,
            self.adapters.slots,
            state_manager,
            config.eos_token_ids,
            windows,
        )
        super().__init__(scheduler, block_size, vocab_size, looks_ahead=self.device.type == "cuda")
        self._make_executor = make_executor
        self.run_over(model, cache, config.num_graph_sequences)

    def run_over(self, model: CausalLM, cache: KVCache, num_graph_sequences: int = 0) -> None:
        """Use this model and this cache from now on.

        The cache must have as many blocks as the previous cache. Captured steps are dropped.
        """
        width = min(self.num_blocks, self.scheduler.block_manager.num_blocks_for(self.config.context.num_tokens))
        self.use(self._make_executor(model, cache, num_graph_sequences, width, self.config.decode_threads))
        self._num_graph_sequences = num_graph_sequences

    def load_adapter(self, name: str, folder: str | Path, is_pinned: bool = False) -> None:
        """Load the LoRA adapter of a folder; it replaces an adapter of the same name.

        `is_pinned`: whether it keeps its slot from its first use on. Raises UserError as `Adapters.load` does.
        """
        with self._adapters_change():
            self.adapters.load(name, Path(folder), self.scheduler.adapters_in_use, is_pinned)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter and its blocks of the prefix cache.

        Raises UserError if the name is unknown or a request uses the adapter.
        """
        with self._adapters_change():
            self.adapters.unload(name, self.scheduler.adapters_in_use)

    @contextmanager
    def _adapters_change(self) -> Iterator[None]:
        """Drop what a change of the adapters makes invalid: prefixes of adapters that are gone, and recorded steps."""
        digests, version = self.adapters.digests, self.adapters.table_version
        try:
            yield
        finally:
            for digest in digests - self.adapters.digests:
                self.scheduler.prefix_cache.forget(digest)
            if self.adapters.table_version != version:
                self.run_over(self.executor.model, self.executor.cache, self._num_graph_sequences)

    def request(
        self,
        id: int,
        prompt_token_ids: list[int],
        decode: DecodeConfig,
        sink: Sink | None = None,
        prediction_token_ids: list[int] | None = None,
        prefix: str | None = None,
        adapter: str | None = None,
    ) -> Request:
        """Return a checked request.

        Raises UserError as `RequestFactory.make` and `Adapters.give` do, and for a prompt that the model cannot take.
        """
        request = self.requests.make(id, prompt_token_ids, decode, sink, prediction_token_ids, prefix)
        return self._with_adapter(request, adapter)

    def pooled_request(
        self,
        id: int,
        prompt_token_ids: list[int],
        pooling: Pooling,
        decode: DecodeConfig,
        prefix: str | None = None,
        adapter: str | None = None,
    ) -> Request:
        """Return a checked request for the prompt's vector.

        Raises UserError as `RequestFactory.make_pooled` and `request` do.
        """
        return self._with_adapter(self.requests.make_pooled(id, prompt_token_ids, pooling, decode, prefix), adapter)

    def _with_adapter(self, request: Request, adapter: str | None) -> Request:
        if adapter is not None:
            request = self.adapters.give(request, adapter)
        self.executor.prompt_features(request.prompt_token_ids)
        return request

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no sequence owns and that are not pinned."""
        return self.scheduler.block_manager.num_free_blocks

    def pin(self, num_blocks: int) -> list[int]:
        """Allocate blocks permanently, at most `num_free_blocks`. Requests can use only the remaining blocks."""
        blocks = self.scheduler.block_manager.allocate(num_blocks)
        self.scheduler.block_manager.pin(blocks)
        self.requests = replace(self.requests, num_blocks=self.requests.num_blocks - num_blocks)
        return blocks

    def remember(self, blocks: list[int], hashes: Iterable[bytes]) -> None:
        """Add pinned blocks to the prefix cache under these hashes."""
        for block, value in zip(blocks, hashes, strict=True):
            self.scheduler.block_manager.remember(block, value)

    @property
    def num_free_window_blocks(self) -> int | None:
        """Number of blocks of the layers with windows that can be pinned while one sequence can still run.

        None: all layers have the same blocks.
        """
        windows = self.scheduler.window_blocks
        return windows.num_pinnable_blocks if windows.num_blocks else None

    def pin_windows(self, hashes: Collection[bytes]) -> list[int]:
        """Pin blocks of the layers with windows, which the prefix cache finds by these hashes.

        At most `num_free_window_blocks`. Requests can use only the remaining blocks.
        """
        windows = self.scheduler.window_blocks
        blocks = windows.pin(hashes)
        self.requests = replace(self.requests, max_window_sequences=windows.max_sequences)
        return blocks

    def use_tiers(self, tiers: BlockTiers) -> None:
        """Keep evicted blocks in these tiers from now on. All layers must have the same blocks, and no layer a state."""
        blocks = self.scheduler.block_manager
        blocks.tiers = tiers
        self.close_tiers = weakref.finalize(self, blocks.close_tiers)  # at the latest at exit

    @property
    def num_free_slots(self) -> int:
        """Number of slots for recurrent states that can be pinned while one sequence can still run."""
        manager = self.scheduler.state_manager
        return manager.num_unpinned_slots - manager.num_needed(1)

    def has_state(self, value: bytes) -> bool:
        """Return whether a snapshot has this hash."""
        return bool(self.scheduler.state_manager.find([value])[1])

    def pin_state(self, value: bytes) -> int:
        """Return a slot whose state stays a snapshot with this hash, which no snapshot has yet.

        The caller must check `num_free_slots` first. Requests can use only the remaining slots.
        """
        manager = self.scheduler.state_manager
        slot = manager.pin(value)
        self.requests = replace(self.requests, num_state_slots=manager.num_unpinned_slots)
        return slot

    def find_cached_blocks(self, hashes: list[bytes]) -> list[int]:
        """Return the cached blocks that match the longest prefix of `hashes`."""
        return self.scheduler.block_manager.find_prefix(hashes)

    def generate(
        self,
        requests: Iterable[Request],
        max_num_requests: int | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> Generator[Output, None, None]:
        """Yield outputs as requests finish.

        Takes the next request when fewer than `max_num_requests` requests run. Closing the iterator cancels unfinished
        requests. A failed request yields an output with its `error`. An exception that one request did not cause is
        raised.
        """
        source = iter(requests)
        with closing(self.steps(lambda: next(source, None), max_num_requests)) as steps:
            for outputs in steps:
                yield from outputs
                on_step()  # after the outputs, so that no output is lost if it raises

    def steps(
        self,
        next_request: Callable[[], Request | Output | None],
        max_num_requests: int | None = None,
        max_tokens: int | None = None,
    ) -> Generator[list[Output], None, None]:
        """Yield the finished outputs after each step, until nothing runs and there is no further request.

        `next_request` is called when fewer than `max_num_requests` requests run. It returns a request, the output of a
        refused request, or None if there is no request now. `max_tokens`: as for `step`. Errors and closing are as in
        `generate`.
        """
        limit = min(max_num_requests or self.config.max_num_requests, self.config.max_num_requests)
        alive: list[SequenceGroup] = []
        try:
            while True:
                while len(alive) < limit and (request := next_request()) is not None:
                    if isinstance(request, Output):
                        yield [request]
                        continue
                    try:
                        alive.append(self.add(request))
                    except BaseException as error:
                        if not belongs_to_request(error):
                            raise
                        yield [Output(request.id, [], len(request.prompt_token_ids), 0, error=error)]
                if not alive:
                    return
                # Steps of another caller may already have finished all groups.
                if any(group.sequences for group in alive):
                    self.step(max_tokens)
                finished = [group for group in alive if not group.sequences]
                alive = [group for group in alive if group.sequences]
                yield [group.output() for group in finished]
        finally:
            for group in alive:
                if group.sequences:  # some groups may have finished in the step that failed
                    self.cancel(group)

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request.

        Call `step` until the group's `sequences` are empty, then take its `output`; or call `cancel`.
        """
        self.adapters.check(request.adapter)
        group = begin_group(request, self.tokenizer, self.executor.prompt_features(request.prompt_token_ids))
        self.scheduler.add(group)
        return group

    @property
    def running(self) -> Collection[SequenceGroup]:
        """The admitted groups, in the order of admission."""
        return self.scheduler.running

    @property
    def waiting(self) -> Collection[SequenceGroup]:
        """The queued groups that are not running, in the order of the queue."""
        return self.scheduler.waiting

    def fail_running(self, error: BaseException) -> None:
        """End all running groups with this error, after a failed step. Raises RuntimeError if blocks are lost."""
        for group in list(self.running):
            self.cancel(group)
            group.error = error
        self.scheduler.check_integrity()
