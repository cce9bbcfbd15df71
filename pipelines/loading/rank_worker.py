"""A worker rank: it loads its shard of the model and runs the operations that rank 0 sends."""

import logging
from contextlib import suppress

import torch

from conf.errors import UserError
from conf.support.terminal import EscapingFormatter, log_warnings
from kernels import build
from kernels.collectives import RankFailed
from pipelines.loading.device import prepare_device
from pipelines.loading.model_to_load import ModelToLoad
from pipelines.loading.rank_shard import OPERATION_TYPES, RankShard
from pipelines.ranks.encoding import decode, encode
from pipelines.ranks.messages import Channel, Gone, Header
from pipelines.ranks.rank_context import worker_context

END_MESSAGE_TIMEOUT_S = 2.0  # seconds that a rank without connection to another rank waits for rank 0 to end it


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
    """A worker rank: receives rank 0's operations, runs them on its shard of the model, and returns results."""

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
        to_load = ModelToLoad.of_message(start)
        device = prepare_device(to_load.device)
        self._context = worker_context(start, to_load.parallel, channel, library)
        self._shard = RankShard(to_load.plan(device, self._name), to_load.device, self._context, self._name)
        self._answer(self._shard.room())

    def step(self) -> None:
        """Receive and run one operation. Raises Gone after the last one."""
        header, content = self._channel.receive()
        if header["op"] == "end":
            raise Gone
        try:
            operation = decode(OPERATION_TYPES[header["op"]], header["fields"], content, self._shard.device)
            result = self._shard.run(operation)
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
