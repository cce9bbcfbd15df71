"""Replicas in Ray workers that share the rows of a job."""

import logging
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from conf.errors import UserError, shortened
from conf.schema import ParallelConfig, ParallelMode, RunConfig
from pipelines.engine.speculation import DraftCounts
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import Counts, EngineRows, Loaded, Record, Row, failed_record
from pipelines.replicas.connection import PLACE_S, connect, waiting_for
from pipelines.replicas.dispatch import MAX_LOSSES, Dispatch
from pipelines.replicas.messages import Failed, Load, Ready, Work, encode, read_answer, read_record, row_bytes
from pipelines.replicas.resources import ResourceSpec, resources_of
from pipelines.replicas.row_worker import RowWorker

log = logging.getLogger(__name__)

NUM_CALLS = 2  # calls in flight per replica: when one returns, the next is already queued
MAX_STARTS = 4  # consecutive starts of a replica without a finished row
WAIT_S = 0.2  # maximum wait for an answer between two checks for signals
BEAT_S = 1.0
BEGIN_S = 120.0  # maximum wait for a worker's first beat after the worker is placed
BEATS = "beats"  # a worker's second thread: it answers `beat` while the first thread computes


class Replica:
    """Resources in the cluster, and the worker that currently holds an engine there."""

    def __init__(self, number: int, kind: type[EngineRows], load: bytes, place: ResourceSpec) -> None:
        """`load`: the first message of a worker."""
        self.number = number
        self.calls: list[Any] = []  # in flight, in order
        self.is_ready = False
        self.num_starts = 0  # since the last finished row
        self._begun: float | None = None  # start of the placement; None: `waits` has checked the placement
        self.heard_at: float | None = None  # when its worker last answered or was placed; None: not placed
        self._has_run = False
        self.counts: list[Counts] = []  # latest counts of each worker
        self._kind, self._load, self.place = kind, load, place
        bundle = {"CPU": place.num_cpus} | ({"GPU": place.num_gpus} if place.num_gpus else {})
        self._group = placement_group([bundle], strategy="STRICT_PACK")

    def start(self) -> None:
        """Start a worker and load a model, as soon as the cluster has the resources."""
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        options = {"max_restarts": 0, "scheduling_strategy": where, "concurrency_groups": {BEATS: 1}}
        self._worker = ray.remote(**options, **asdict(self.place))(RowWorker).remote()
        self.heard_at, self._has_run = None, False
        self._ask_for_beat()
        self.calls = [self._worker.load.remote(self._kind, self._load)]
        self.is_ready, self._begun = False, monotonic()
        self.num_starts += 1
        self.counts.append(Counts(0, DraftCounts(), 0))

    def is_late(self) -> bool:
        """Whether placement has been pending for longer than PLACE_S."""
        return self._begun is not None and monotonic() - self._begun >= PLACE_S

    def waits(self) -> bool:
        """Return whether placement is pending. The first call for a worker checks it; later calls return False."""
        is_unknown, self._begun = self._begun is not None, None
        return is_unknown and not self._has_place()

    def _has_place(self) -> bool:
        return bool(placement_group_table(self._group)["state"] == "CREATED")

    def listen(self) -> None:
        """Record the time if since the last call the worker answered `beat`, or if it is placed now."""
        if ray.wait([self._beat], timeout=0)[0]:
            self.heard_at, self._has_run = monotonic(), True
            if self.heard_at - self._asked_at > BEAT_S:
                self._ask_for_beat()
        elif self.heard_at is None and self._has_place():
            self.heard_at = monotonic()

    def patience_s(self, heartbeat_s: float) -> float:
        """Return the maximum silence of the worker in seconds: `heartbeat_s` after its first beat, BEGIN_S before."""
        return heartbeat_s if self._has_run else BEGIN_S

    def _ask_for_beat(self) -> None:
        self._asked_at = monotonic()
        self._beat = self._worker.beat.options(concurrency_group=BEATS).remote()

    def work(self, content: bytes) -> None:
        self.calls.append(self._worker.work.remote(content))

    def stop(self) -> None:
        """End the worker. Its pending calls get no answer."""
        self.calls.clear()
        ray.kill(self._worker)

    def close(self) -> None:
        self.stop()
        remove_placement_group(self._group)


class RowReplicas:
    """A `RowExecutor` that runs rows on replicas of a model. Rows of a lost replica are run again, by any replica."""

    loaded: Loaded

    def __init__(
        self,
        replicas: list[Replica],
        batch_size: int,
        failed: Callable[[PromptRow, BaseException], Row],
        heartbeat_s: float,
    ) -> None:
        """`batch_size`: rows that run at once in a replica.

        `failed`: as in EngineRows. `heartbeat_s`: maximum silence of a worker.
        """
        self._all = replicas
        self._replicas = list(replicas)  # without the replicas that are given up
        self._batch_size = batch_size
        self._failed = failed
        self._heartbeat_s = heartbeat_s
        self._looked_at = monotonic()
        self._first: Ready | None = None
        self._dispatch = Dispatch(lambda: None, 0)

    @property
    def num_generated_tokens(self) -> int:
        return sum(counts.num_generated_tokens for counts in self._counts())

    def counts(self) -> Counts:
        """Return the summed counts of all workers, with the largest peak memory of one worker."""
        worker_counts = self._counts()
        drafts = DraftCounts(*map(sum, zip(*(counts.drafts for counts in worker_counts), strict=True)))
        return Counts(self.num_generated_tokens, drafts, max(counts.peak_memory_bytes for counts in worker_counts))

    def load(self) -> None:
        """Load the models. Raises UserError if one cannot be loaded, or if two would give different rows."""
        for replica in self._replicas:
            replica.start()
        while not all(replica.is_ready for replica in self._replicas):
            self._receive()
        assert self._first is not None
        self.loaded = self._first.loaded

    def steps(self, next_row: Callable[[], PromptRow | None], seed: int | None) -> Generator[list[Record], None, None]:
        """Yield the records of rows as they arrive. Raises UserError if no replica is left."""
        self._dispatch = Dispatch(next_row, 2 * self._batch_size)
        while True:
            for replica in self._replicas:
                self._send(replica, seed)
            if self._dispatch.is_done:
                return
            yield self._receive()

    def close(self) -> None:
        for replica in self._all:
            replica.close()

    def _counts(self) -> list[Counts]:
        return [counts for replica in self._all for counts in replica.counts]

    def _send(self, replica: Replica, seed: int | None) -> None:
        """Send a replica new rows, or an empty `Work` if it only has to continue its rows."""
        while replica.is_ready and len(replica.calls) < NUM_CALLS:
            rows = self._dispatch.take(replica.number, self._batch_size)
            if not rows and (replica.calls or not self._dispatch.holds(replica.number)):
                return
            replica.work(encode(Work(seed, list(map(row_bytes, rows)))))

    def _receive(self) -> list[Record]:
        self._say_who_waits()
        replicas = {call: replica for replica in self._replicas for call in replica.calls}
        records: list[Record] = []
        for call in ray.wait(list(replicas), timeout=WAIT_S)[0]:
            replica = replicas[call]
            replica.calls.remove(call)
            try:
                content = ray.get(call)
            except RayError as error:
                reason = str(getattr(error, "cause", None) or error).strip().split("\n")[0]
                records += self._lost(replica, shortened(reason))
            else:
                records += self._take(replica, content)
        for replica in self._silent():
            records += self._lost(replica, f"it has been silent for {replica.patience_s(self._heartbeat_s):g} s")
        return records

    def _silent(self) -> list[Replica]:
        now = monotonic()
        was_stopped = now - self._looked_at > self._heartbeat_s / 2  # this process was stopped, for example by Ctrl-Z
        self._looked_at = now
        silent = []
        for replica in self._replicas:
            replica.listen()
            if replica.heard_at is None:
                continue
            if was_stopped:
                replica.heard_at = now
            elif now - replica.heard_at > replica.patience_s(self._heartbeat_s):
                silent.append(replica)
        return silent

    def _say_who_waits(self) -> None:
        if not any(replica.is_late() for replica in self._replicas):
            return
        if waiting := [replica for replica in self._replicas if replica.waits()]:
            numbers = ", ".join(str(replica.number) for replica in waiting)
            log.warning("replicas %s: %s", numbers, waiting_for(waiting[0].place))

    def _take(self, replica: Replica, content: bytes) -> list[Record]:
        answer = read_answer(content)
        if isinstance(answer, Failed):
            raise UserError(answer.message)
        if isinstance(answer, Ready):
            self._first = self._first or answer
            if changed := _differences(self._first, answer):
                raise UserError(f"the replicas would give different rows ({changed}): give them equal machines")
            replica.is_ready = True
            return []
        replica.counts[-1] = answer.counts
        records = list(map(read_record, answer.records))
        for record in records:
            replica.num_starts = 1
            self._dispatch.done(replica.number, record["row"]["index"])
        return records

    def _lost(self, replica: Replica, reason: str) -> list[Record]:
        """Restart a lost replica, and return the records of rows that are given up.

        Raises UserError if no replica is left.
        """
        replica.stop()
        given_up = self._dispatch.lost(replica.number)
        if given_up:
            replica.num_starts = 0
        if replica.num_starts < MAX_STARTS:
            log.warning("replica %d is lost and restarted, and its rows run again: %s", replica.number, reason)
            replica.start()
        else:
            self._replicas.remove(replica)
            log.warning("replica %d is given up, lost %d times in a row: %s", replica.number, MAX_STARTS, reason)
            if not self._replicas:
                message = f"every replica was lost {MAX_STARTS} times in a row, the last one by: {reason}"
                raise UserError(f"{message}; see Ray's logs. The same command continues after the finished rows")
        fault = UserError(f"{MAX_LOSSES} replicas were lost with this row, which ran alone in the last one: {reason}")
        return [failed_record(row, self._failed(row, fault)) for row in given_up]


def start_rows(kind: type[EngineRows], run: RunConfig) -> RowReplicas:
    """Return `parallel.replicas` replicas of the model of `run`, not loaded yet.

    `kind`: the class that runs the rows of each. Raises UserError if the machines lack the CPUs or GPUs.
    """
    parallel = run.parallel
    tp, pp = parallel.tp or 1, parallel.pp or 1
    place = resources_of("parallel.replicas", parallel.replicas, run.device, *connect(), tp * pp)
    predict = replace(run.predict, data=None, resume="none")  # these settings concern only the job
    replica_parallel = ParallelConfig()
    if tp * pp > 1:
        mode = ParallelMode.tp if pp == 1 else ParallelMode.pp if tp == 1 else ParallelMode.tp_pp
        replica_parallel = replace(parallel, mode=mode, replicas=1)
    replica_run = replace(run, parallel=replica_parallel, predict=predict, device=place.device(run.device, tp * pp))
    content = encode(Load(replica_run, place.num_own_cpus))
    replicas = [Replica(number, kind, content, place) for number in range(run.parallel.replicas)]
    return RowReplicas(replicas, run.predict.batch_size, kind.failed, parallel.heartbeat_s)


def _differences(first: Ready, second: Ready) -> str:
    first_fields, second_fields = first.loaded.fingerprint, second.loaded.fingerprint
    names = [name for name in first_fields | second_fields if first_fields.get(name) != second_fields.get(name)]
    if not names and first.replay != second.replay:
        names = ["Quintet's code, torch or the processor's instructions"]
    return ", ".join(names)
