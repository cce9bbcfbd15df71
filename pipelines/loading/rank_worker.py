"""A worker rank: it loads its shard of the model and runs the operations that rank 0 sends."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import torch

from conf.compose import from_json
from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import Backend, DeviceConfig, ModelConfig, ParallelConfig
from conf.support.terminal import EscapingFormatter, log_warnings
from kernels import build
from kernels.collectives import RankFailed
from models.batch import KVCache
from models.heads import HeadKind
from pipelines.engine.adapters import AdapterChange, FillSlot, LoadAdapter, UnloadAdapter
from pipelines.engine.executor import Executor, Operation
from pipelines.engine.kv_cache import BLOCK_SIZE, allocate_kv_cache
from pipelines.engine.operations import OPERATIONS
from pipelines.jobs.journal import Fingerprint
from pipelines.loading.adapter_table import make_adapters
from pipelines.loading.cache_allocation import cache_formats, most_blocks
from pipelines.loading.device import prepare_device
from pipelines.loading.fingerprint import common_fingerprint
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.ranks import BeginQuantization, UseStaticCache, share_of
from pipelines.loading.quantize.share import STEPS, Share, Step
from pipelines.loading.rank_operations import Count, MakeExecutor
from pipelines.loading.shard_plan import shard_plan
from pipelines.loading.weight_loading import load_planned
from pipelines.ranks.encoding import decode, encode
from pipelines.ranks.messages import Channel, Gone, Header
from pipelines.ranks.rank_context import layout_of, shared_memory_context, torch_context

END_MESSAGE_TIMEOUT_S = 2.0  # seconds that a rank without connection to another rank waits for rank 0 to end it

OWN_OPERATIONS = MakeExecutor, Count, BeginQuantization, UseStaticCache
TYPES = {each.__name__: each for each in (*OPERATIONS, *STEPS, *get_args(AdapterChange), *OWN_OPERATIONS)}
"""The types of the operations that rank 0 sends, by name."""


@torch.inference_mode()
def run_worker(channel: Channel, start: Header) -> None:
    """Load a rank's shard and run rank 0's operations. Raises Gone at the end, and every exception of an operation."""
    worker = RankWorker(channel, start)
    while True:
        worker.step()


class _LogOfRank0(logging.Handler):
    """Forwards this rank's log records to rank 0, which writes them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s: %(message)s"))
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Gone):
            self._channel.send({"log": self.format(record)})

    def send(self, text: str) -> None:
        self.emit(logging.LogRecord(__name__, logging.INFO, __file__, 0, text, None, None))


class RankWorker:
    """A worker rank. It has one shard of the model and runs rank 0's operations on it."""

    _executor: Executor
    _share: Share

    def __init__(self, channel: Channel, start: Header) -> None:
        """Load the rank's shard. `start`: rank 0's first message. With shared memory, a file descriptor follows it.

        Raises UserError as `load_engine` does, and if files or code of this machine differ from rank 0's files or code.
        Raises Gone if rank 0 has closed the channel.
        """
        self._channel = channel
        self._name = start["name"]
        log_warnings()
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.ERROR)  # rank 0 logs the warnings
        log_to = _LogOfRank0(channel)
        logging.getLogger().addHandler(log_to)
        log_to.send(f"{self._name} loads its part")
        library = build.library()
        if library is None and not start["num_gpus"]:  # a rank on another machine may lack them
            raise UserError(
                f"{self._name} has no C++ kernels, which rank 0 has: give it a compiler, or parallel=single"
            )
        self._config = from_json(DeviceConfig, start["device"])
        device = prepare_device(self._config)
        parallel = from_json(ParallelConfig, start["parallel"])
        parallel_layout = layout_of(start["rank"], start["tp"], start["pp"], parallel)
        if "store" in start:
            backend, (host, port) = Backend[start["backend"]], start["store"]
            local = start["num_local"], start["num_gpus"]
            context = torch_context(backend, (host, port), start["address"], parallel_layout, *local)
        else:
            assert library is not None
            context = shared_memory_context(library, channel.receive_file(), parallel_layout, start["spins"])
        self._context = context
        head = None if start["head"] is None else HeadKind[start["head"]]
        model = from_json(ModelConfig, start["model"])
        source = resolve_model(model, head)
        if "common" in start:
            self._compare(start["common"], common_fingerprint(source.checkpoint.path))
        if start["predicts_ahead"]:
            source = source.predicting_ahead()
        whole = plan_model(model, from_json(QuantConfig, start["quant"]), source, device, packed=start["packed"])
        plan = shard_plan(whole, parallel_layout, context.group, context.neighbours)
        load_planned(plan)
        self._plan = plan
        self._adapters = make_adapters(plan)
        self._cache: KVCache | None = None
        self._answer(most_blocks(plan, self._config, context.size, context.num_sharing))

    def _compare(self, wanted: Fingerprint, found: Fingerprint) -> None:
        names = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
        if names:
            raise UserError(
                f"{self._name} has not what rank 0 has, but another {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}: "
                "give all machines the same files and versions"
            )

    def step(self) -> None:
        """Receive and run one operation. Raises Gone after the last one."""
        header, content = self._channel.receive()
        if header["op"] == "end":
            raise Gone
        try:
            operation = decode(TYPES[header["op"]], header["fields"], content, self._plan.device)
            result = self._run(operation)
            self._context.check()
        except RankFailed:
            # Rank 0 ends this rank and reports the reason. If it does not, only a connection has failed.
            self._channel.wait_for_end(END_MESSAGE_TIMEOUT_S)
            raise UserError(f"{self._name} has lost its connection to another rank") from None
        except BaseException:
            self._context.abort()  # releases the other ranks, which wait for this rank
            raise
        if self._context.parallel_layout.rank in header["answering"]:
            self._answer(result)

    def _answer(self, result: object) -> None:
        fields, payload = encode(result)
        self._channel.send({"result": fields}, payload)

    def _run(self, operation: Any) -> Any:
        match operation:
            case Operation():
                return operation.compute(self._executor)
            case Step():
                return operation.compute(self._share)
            case MakeExecutor():
                self._make_executor(operation)
            case LoadAdapter(name, folder, digest):
                self._adapters.load(name, Path(folder), in_use=())
                if self._adapters.find(name).digest != digest:
                    what = f"{self._name} has another adapter {name} than rank 0"
                    raise UserError(f"{what}: give all machines the same files")
            case UnloadAdapter(name):
                self._adapters.unload(name, in_use=())
            case FillSlot(slot, name):
                self._adapters.fill(slot, self._adapters.find(name))
            case BeginQuantization():
                assert self._cache is not None
                one_layer = KVCache(self._cache.layers[:1])
                batches = [self._executor.on_device(batch) for batch in operation.batches]
                self._share = share_of(operation, self._plan, batches, one_layer, self._context.group)
            case UseStaticCache():
                assert self._cache is not None
                self._cache = self._share.static_cache(self._cache)
        return None

    def _make_executor(self, operation: MakeExecutor) -> None:
        plan = self._plan
        if self._cache is None:
            sizes = operation.num_blocks, self._config.block_size or BLOCK_SIZE[plan.device.type]
            formats = cache_formats(plan)
            self._cache = allocate_kv_cache(plan.model.attention_heads, *sizes, formats, plan.dtype, plan.device)
        graphs, width = operation.num_graph_sequences, operation.table_width
        self._executor = Executor(plan.model, self._cache, graphs, width, self._config.decode_threads)
