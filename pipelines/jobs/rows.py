"""Run the rows of a job on an engine: a task makes a request from each row, and a record from its output."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from conf.decoding import DecodeConfig
from conf.schema import RunConfig
from pipelines.engine import Engine, Output, ProbeResult, Request
from pipelines.engine.speculation import DraftCounts
from pipelines.jobs import report
from pipelines.jobs.journal import Fingerprint
from pipelines.jobs.prompt_encoder import EncodedPrompt
from pipelines.jobs.prompts import PromptRow

Row = dict[str, Any]
"""A row of a job's results."""
Record = dict[str, Any]
"""A line of the journal: the `row`, the `digest` of its input, `num_cached_tokens`, and further data of the task."""
ANSWER = "answer"  # key of a record: the answer to a line of an OpenAI batch


@dataclass(frozen=True)
class Loaded:
    """A model that is ready for rows."""

    decode: DecodeConfig
    """Default settings of rows: the run's, completed by the checkpoint's."""
    fingerprint: Fingerprint
    """Everything that determines a row's results, except its input and its seed."""
    weight_bytes: int
    num_values: int = 0
    """How many numbers the result of a row has; 0 if the result is a text."""
    divergence: ProbeResult | None = None
    """Of a quantised model from floats, if it is measured."""


@dataclass(frozen=True)
class Counts:
    """The engine's counts since the model was loaded."""

    num_generated_tokens: int
    drafts: DraftCounts
    peak_memory_bytes: int


@dataclass(frozen=True)
class RowRequest:
    """The engine requests of a row."""

    request: Request
    """Its id is the row's index."""
    prompt: EncodedPrompt
    answer: Callable[[Output], Row] | None = None
    """Formats the output as a line of an OpenAI batch; None if the row is not a line of a batch."""
    more: tuple[Request, ...] = ()
    """Further requests of the row, for vectors that are compared. They have the same id."""

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.request, *self.more


class RowOutputs:
    """Joins the outputs of a row's requests."""

    def __init__(self) -> None:
        self._ended: dict[int, list[Output]] = {}

    def add(self, output: Output, num_requests: int) -> Iterator[Output]:
        """Yield the row's output if all its requests have ended. Vectors of several requests are stacked, in any
        order."""
        ended = self._ended.setdefault(output.request_id, [])
        ended.append(output)
        if len(ended) == num_requests:
            yield _joined(self._ended.pop(output.request_id))


def _joined(outputs: list[Output]) -> Output:
    if len(outputs) == 1:
        return outputs[0]
    error = next((output.error for output in outputs if output.error is not None), None)
    return replace(
        outputs[0],
        num_prompt_tokens=sum(output.num_prompt_tokens for output in outputs),
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        pooled=None if error else torch.stack([output.pooled for output in outputs]),
        error=error,
    )


@dataclass(frozen=True)
class Variation:
    """How rows run, without an effect on their results."""

    max_num_requests: int | None = None
    """Most rows that run at once; None: the engine's limit."""
    max_tokens: int | None = None
    """Token budget of a step; None: the engine's."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request's SamplingParams."""
    observe: Callable[[Output], None] = lambda output: None
    """Called with each output."""

    def of(self, row_request: RowRequest) -> RowRequest:
        request, *more = (
            replace(request, params=replace(request.params, **self.params)) for request in row_request.requests
        )
        return replace(row_request, request=request, more=tuple(more))


AS_LOADED = Variation()


class RowExecutor(Protocol):
    """Runs rows, in any order."""

    @property
    def loaded(self) -> Loaded: ...

    @property
    def num_generated_tokens(self) -> int: ...

    def counts(self) -> Counts: ...

    def steps(self, next_row: Callable[[], PromptRow | None], seed: int | None) -> Generator[list[Record], None, None]:
        """Yield the records of finished rows until no row is left. A list may be empty.

        `next_row` is called when the engine has room. It returns None if there is no row now. `seed`: the seed of
        rows that do not set a seed.
        """


class EngineRows(ABC):
    """Runs rows on one engine. A subclass defines the request and the record of a row."""

    def __init__(self, engine: Engine, loaded: Loaded) -> None:
        self.engine = engine
        self.loaded = loaded

    @classmethod
    @abstractmethod
    def load(
        cls, run: RunConfig, progress: report.ProgressSink = report.NO_PROGRESS, rows: Iterable[PromptRow] = ()
    ) -> "EngineRows":
        """Load the model of `run`. Raises UserError if it cannot be loaded, and for settings with which no row can run.

        `rows`: read only for an error message, which names a value that fits the rows.
        """

    @abstractmethod
    def ask(self, row: PromptRow, seed: int | None) -> RowRequest:
        """Return the requests of a row. An exception becomes the row's error."""

    @abstractmethod
    def record(self, row: PromptRow, row_request: RowRequest, output: Output) -> Record:
        """Return the journal record of a finished row: its `row`, and further data for the job's files."""

    @staticmethod
    @abstractmethod
    def failed(row: PromptRow, error: BaseException) -> Record:
        """Return the journal record of a failed row. Raises `error` again if the row did not cause it."""

    @property
    def num_generated_tokens(self) -> int:
        return self.engine.num_generated_tokens

    def counts(self) -> Counts:
        """Return the counts of this process. The peak memory includes the model's other ranks."""
        engine = self.engine
        peak = report.peak_memory_of(engine)
        return Counts(engine.num_generated_tokens, engine.speculator.counts, peak)

    def steps(
        self, next_row: Callable[[], PromptRow | None], seed: int | None, variation: Variation = AS_LOADED
    ) -> Generator[list[Record], None, None]:
        """Yield the records of the rows that each step finished, as `RowExecutor.steps` does."""
        running: dict[int, tuple[PromptRow, RowRequest | None]] = {}
        waiting, row_outputs = deque[Request](), RowOutputs()

        def next_request() -> Request | Output | None:
            if waiting:
                return waiting.popleft()
            row = next_row()
            if row is None:
                return None
            try:
                row_request = variation.of(self.ask(row, seed))
            except BaseException as error:
                running[row.index] = row, None
                return Output(row.index, [], 0, 0, error=error)
            running[row.index] = row, row_request
            waiting.extend(row_request.more)
            return row_request.request

        def finished(output: Output) -> Iterator[Record]:
            row_request = running[output.request_id][1]
            for whole in row_outputs.add(output, len(row_request.requests) if row_request else 1):
                yield self._record(*running.pop(output.request_id), whole)

        with closing(self.engine.steps(next_request, variation.max_num_requests, variation.max_tokens)) as steps:
            for outputs in steps:
                for output in outputs:
                    variation.observe(output)
                yield [record for output in outputs for record in finished(output)]

    def _record(self, row: PromptRow, row_request: RowRequest | None, output: Output) -> Record:
        if output.error is not None:
            return failed_record(row, self.failed(row, output.error))
        assert row_request is not None
        return {
            "digest": row.digest,
            "num_cached_tokens": output.num_cached_tokens,
            **self.record(row, row_request, output),
        }


def failed_record(row: PromptRow, failed: Record) -> Record:
    """Return the journal record of a failed row. `failed`: the task's part of the record."""
    return {"digest": row.digest, "num_cached_tokens": 0, **failed}
