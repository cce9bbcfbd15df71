"""The computation of a worker rank: its shard of the model, in the operations that rank 0 sends."""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from conf.compose import from_json
from conf.errors import UserError
from conf.schema import Backend
from conf.speculation import Speculate
from conf.support.terminal import EscapingFormatter, log_warnings
from kernels import build
from kernels.collectives import RankFailed
from models.batch import Batch, BatchShape, KVCache
from models.heads import HeadKind
from pipelines.engine.executor import Executor
from pipelines.engine.kv_cache import BLOCK_SIZE, allocate_kv_cache
from pipelines.jobs.journal import Fingerprint
from pipelines.jobs.report import peak_memory_bytes
from pipelines.loading.assembly import cache_formats, load_planned, make_adapters, most_blocks
from pipelines.loading.device import prepare_device
from pipelines.loading.drafting import predicting_ahead
from pipelines.loading.fingerprint import common_fingerprint
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model, shard_plan
from pipelines.loading.quantize.ranks import WorkerShare
from pipelines.ranks.messages import Channel, Gone, Header
from pipelines.ranks.rank_context import layout_of, shared_memory_context, torch_context
from pipelines.ranks.tensors import described, numbers_of, read

REASON_S = 2.0  # for rank 0 to end this rank


@torch.inference_mode()
def run_worker(channel: Channel, start: Header) -> None:
    """Load a rank's shard and run rank 0's operations. Raises Gone at the end, and any exception of an operation."""
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
    """A worker rank: its shard of the model, and a method for each operation of rank 0."""

    def __init__(self, channel: Channel, start: Header) -> None:
        """Load the rank's shard. `start`: the first message; with shared memory a file descriptor follows it.

        Raises UserError as `load_engine` does, and if this machine's files or code differ from rank 0's. Raises Gone.
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
        if library is None and not start["num_gpus"]:  # possible on another machine
            raise UserError(
                f"{self._name} has no C++ kernels, which rank 0 has: give it a compiler, or parallel=single"
            )
        run = from_json(start["run"])
        device = prepare_device(run.device)
        parallel_layout = layout_of(start["rank"], start["tp"], start["pp"], run.parallel)
        if "store" in start:
            backend, (host, port) = Backend[start["backend"]], start["store"]
            local = start["num_local"], start["num_gpus"]
            context = torch_context(backend, (host, port), start["address"], parallel_layout, *local)
        else:
            assert library is not None
            context = shared_memory_context(library, channel.receive_file(), parallel_layout, start["spins"])
        self._context = context
        is_last_stage = parallel_layout.stage == parallel_layout.pp - 1
        self._answers = parallel_layout.pp > 1 and is_last_stage and parallel_layout.tp_rank == 0
        head = None if start["head"] is None else HeadKind[start["head"]]
        source = resolve_model(run.model, head)
        if "common" in start:
            self._compare(start["common"], common_fingerprint(source.checkpoint.path))
        if run.decode.speculate is Speculate.mtp:
            source = predicting_ahead(source)
        whole = plan_model(run.model, run.quant, source, device, packed=start["packed"])
        plan = shard_plan(whole, parallel_layout, context.group, context.neighbours)
        load_planned(plan)
        self._run, self._plan = run, plan
        self._adapters = make_adapters(plan)
        self._cache: KVCache | None = None
        channel.send({"num_blocks": most_blocks(plan, run.device, context.size, context.num_sharing)})

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
            results = self._operation(header["op"])(header, content)
            self._context.check()
        except RankFailed:
            self._channel.wait_for_end(REASON_S)  # rank 0 reports the reason, unless only a connection has failed
            raise UserError(f"{self._name} has lost its connection to another rank") from None
        except BaseException:
            self._context.abort()  # the other ranks wait for this rank
            raise
        if self._answers and results is not None:
            self._channel.send({"tensors": described(results)}, numbers_of(results))

    def _operation(self, name: str) -> Callable[[Header, bytearray], list[Tensor] | None]:
        """Return the method of an operation. It returns the tensors that the last stage sends to rank 0, or None."""
        return {
            "make_executor": self._make_executor,
            "execute": self._execute,
            "execute_whole": self._execute_whole,
            "hidden": self._hidden,
            "hidden_from": self._hidden_from,
            "predict_ahead": self._predict_ahead,
            "clear_ahead": self._clear_ahead,
            "logits": self._logits,
            "copy_blocks": self._copy_blocks,
            "store": self._store,
            "write_blocks": self._write_blocks,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "fill_slot": self._fill_slot,
            "count": self._count,
            "quantize": self._quantize,
        }[name]

    def _make_executor(self, header: Header, content: bytearray) -> None:
        """Create the executor, or replace it over the same cache, which drops recorded steps."""
        plan, config = self._plan, self._run.device
        if self._cache is None:
            sizes = header["num_blocks"], config.block_size or BLOCK_SIZE[plan.device.type]
            formats = cache_formats(plan)
            self._cache = allocate_kv_cache(plan.model.attention_heads, *sizes, formats, plan.dtype, plan.device)
        graphs, width = header["num_graph_sequences"], header["table_width"]
        self._executor = Executor(plan.model, self._cache, graphs, width, config.decode_threads)

    def _execute(self, header: Header, content: bytearray) -> list[Tensor]:
        (batch,) = _batches(header, content)
        outputs = self._executor.execute(batch)
        return [outputs.hidden, outputs.logits]

    def _execute_whole(self, header: Header, content: bytearray) -> list[Tensor]:
        batch, whole = _batches(header, content)
        outputs, hidden = self._executor.execute_whole(batch, whole)
        return [outputs.hidden, outputs.logits, hidden]

    def _hidden(self, header: Header, content: bytearray) -> list[Tensor]:
        (batch,) = _batches(header, content)
        return [self._executor.hidden(batch)]

    def _hidden_from(self, header: Header, content: bytearray) -> list[Tensor]:
        (batch,) = _batches(header, content)
        return [self._executor.hidden_from(batch, self._tensor(header, content))]

    def _predict_ahead(self, header: Header, content: bytearray) -> None:
        (batch,) = _batches(header, content)
        self._executor.predict_ahead(self._tensor(header, content), batch)

    def _clear_ahead(self, header: Header, content: bytearray) -> None:
        self._executor.clear_ahead()

    def _logits(self, header: Header, content: bytearray) -> list[Tensor]:
        return [self._executor.unchecked_logits(self._tensor(header, content))]

    def _copy_blocks(self, header: Header, content: bytearray) -> None:
        self._executor.copy_blocks(header["copies"])

    def _store(self, header: Header, content: bytearray) -> None:
        self._executor.store(self._tensor(header, content), header["slots"])

    def _write_blocks(self, header: Header, content: bytearray) -> None:
        self._executor.write_blocks(header["name"], self._tensor(header, content), header["blocks"])

    def _load_adapter(self, header: Header, content: bytearray) -> None:
        name = header["name"]
        self._adapters.load(name, Path(header["folder"]), in_use=())
        if self._adapters.find(name).digest != header["digest"]:
            raise UserError(f"{self._name} has another adapter {name} than rank 0: give all machines the same files")

    def _unload_adapter(self, header: Header, content: bytearray) -> None:
        self._adapters.unload(header["name"], in_use=())

    def _fill_slot(self, header: Header, content: bytearray) -> None:
        self._adapters.fill(header["slot"], self._adapters.find(header["name"]))

    def _tensor(self, header: Header, content: bytearray) -> Tensor:
        start = sum(BatchShape(*sizes).num_numbers for sizes in header["shapes"]) * torch.int64.itemsize
        (tensor,) = read(header["tensors"], content, start)
        return tensor.to(self._plan.device)

    def _quantize(self, header: Header, content: bytearray) -> None:
        assert self._cache is not None
        if header["step"] == "begin":
            batches = [self._executor.on_device(batch) for batch in _batches(header, content)]
            one_layer = KVCache(self._cache.layers[:1])
            self._share = WorkerShare(self._channel, self._context, self._plan, batches, one_layer, header)
        elif header["step"] == "static_cache":
            self._cache = self._share.static_cache(self._cache)
        else:
            self._share.follow(header, content)

    def _count(self, header: Header, content: bytearray) -> None:
        executor = self._executor
        self._channel.send(
            {
                "weight_bytes": executor.weight_bytes,
                "step_weight_bytes": executor.step_weight_bytes(header["num_sequences"]),
                "kv_bytes_per_token": executor.kv_bytes_per_token,
                "peak_memory_bytes": peak_memory_bytes(self._plan.device),
            }
        )


def _batches(header: Header, content: bytearray) -> list[Batch]:
    num_numbers = sum(BatchShape(*sizes).num_numbers for sizes in header["shapes"])
    numbers, batches = torch.frombuffer(content, dtype=torch.int64, count=num_numbers), []
    for sizes in header["shapes"]:
        shape = BatchShape(*sizes)
        batches.append(Batch(numbers[: shape.num_numbers], shape))
        numbers = numbers[shape.num_numbers :]
    return batches
