"""What a rank other than 0 computes: its part of the model, in the steps that rank 0 says."""

import logging
from collections.abc import Callable

import torch

from conf.compose import from_json
from conf.terminal import log_warnings
from kernels import build
from kernels.collectives import RankFailed
from kernels.collectives.shared_memory import SharedMemory
from models.batch import Batch, BatchShape
from models.cuts import Division
from models.heads import Head
from pipelines.assembly import cache_formats, load_planned, most_blocks
from pipelines.device import prepare_device
from pipelines.engine.kv_cache import BLOCK_SIZE, allocate_kv_cache
from pipelines.engine.runner import Runner
from pipelines.opening import open_source
from pipelines.planning import divide_plan, plan_model
from pipelines.ranks.messages import Channel, Gone, Header


@torch.inference_mode()
def run_follower(channel: Channel, start: Header) -> None:
    """Load a rank's part of the model and do what rank 0 says. Raises Gone at the end, and whatever ends a step."""
    follower = Follower(channel, start)
    while True:
        follower.step()


class Follower:
    """A rank: the model as rank 0 has planned it, and its runner."""

    def __init__(self, channel: Channel, start: Header) -> None:
        """Load the rank's part. `start`: the first message, before a file descriptor. Raises UserError as `load_engine` does, and Gone."""
        self._channel = channel
        log_warnings()
        logging.getLogger().setLevel(logging.ERROR)  # rank 0 warns
        library = build.library()
        assert library is not None  # rank 0 has it, on this machine
        rank, size = start["rank"], start["size"]
        self._group = SharedMemory(library, channel.receive_file(), rank, size, start["spins"])
        run = from_json(start["run"])
        device = prepare_device(run.device)
        head = None if start["head"] is None else Head[start["head"]]
        whole = plan_model(run, open_source(run.model, head), device, packed=True)
        plan = divide_plan(whole, Division(size, tp_rank=rank), self._group)
        load_planned(run, plan)
        channel.send({"num_blocks": most_blocks(run, plan, size)})
        begin, _ = channel.receive()
        if begin["op"] != "begin":
            raise Gone
        sizes = begin["num_blocks"], run.device.block_size or BLOCK_SIZE[device.type]
        formats = cache_formats(run, plan)
        cache = allocate_kv_cache(plan.model.attention_heads, *sizes, formats, plan.dtype, device)
        self._dtype = plan.dtype
        self._runner = Runner(plan.model, cache, 0, begin["table_width"], run.device.decode_threads)

    def step(self) -> None:
        """Compute what rank 0 says next. Raises Gone where there is nothing more."""
        header, content = self._channel.receive()
        if header["op"] == "end":
            raise Gone
        try:
            self._operation(header["op"])(header, content)
            self._group.check()
        except RankFailed:
            raise Gone from None  # rank 0 knows
        except BaseException:
            self._group.abort()  # the others wait for this one
            raise

    def _operation(self, name: str) -> Callable[[Header, bytearray], object]:
        return {
            "execute": self._execute,
            "execute_whole": self._execute_whole,
            "hidden": self._hidden,
            "logits": self._logits,
            "copy_blocks": self._copy_blocks,
        }[name]

    def _execute(self, header: Header, content: bytearray) -> None:
        (batch,) = _batches(header, content)
        self._runner.execute(batch)

    def _execute_whole(self, header: Header, content: bytearray) -> None:
        batch, whole = _batches(header, content)
        self._runner.execute_whole(batch, whole)

    def _hidden(self, header: Header, content: bytearray) -> None:
        (batch,) = _batches(header, content)
        self._runner.hidden(batch)

    def _logits(self, header: Header, content: bytearray) -> None:
        rows, channels = header["size"]
        hidden = torch.frombuffer(content, dtype=self._dtype) if content else torch.empty(0, dtype=self._dtype)
        self._runner.model.logits(hidden.view(rows, channels))

    def _copy_blocks(self, header: Header, content: bytearray) -> None:
        self._runner.copy_blocks(header["copies"])


def _batches(header: Header, content: bytearray) -> list[Batch]:
    """Return the batches of a message, whose numbers follow each other."""
    numbers, batches = torch.frombuffer(content, dtype=torch.int64), []
    for sizes in header["shapes"]:
        shape = BatchShape(*sizes)
        batches.append(Batch(numbers[: shape.num_numbers], shape))
        numbers = numbers[shape.num_numbers :]
    return batches
