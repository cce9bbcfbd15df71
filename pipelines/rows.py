"""Run the rows of a job: what a task asks of an engine for each row, and what it makes of the output."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from conf.decoding import DecodeConfig
from conf.schema import RunConfig
from pipelines import report
from pipelines.engine import Engine, Output, Request
from pipelines.engine.speculation import DraftCounts
from pipelines.journal import Fingerprint
from pipelines.prompts import PromptRow

Row = dict[str, Any]
"""A row of a job's results."""
Record = dict[str, Any]
"""A line of the journal: the `row`, the `digest` of its input, `num_cached_tokens`, and what else a job keeps of it."""


@dataclass(frozen=True)
class Loaded:
    """A model that is ready for rows."""

    decode: DecodeConfig
    """The settings of rows that say nothing: the run's, completed by the checkpoint's."""
    fingerprint: Fingerprint
    """All that decides a row's results beside its input and its seed."""
    weight_bytes: int
    num_values: int = 0
    """How many numbers a row gives; 0 where it gives texts."""


@dataclass(frozen=True)
class Counts:
    """Counts what the engine has done since the model was loaded."""

    num_generated_tokens: int
    drafts: DraftCounts
    peak_memory_bytes: int


@dataclass(frozen=True)
class RowRequest:
    """The request that a row makes to the engine."""

    request: Request
    """Its id is the row's index."""
    prompt: str | None = None
    """The model's input as text, for results that tell it."""
    answer: Callable[[Output], Row] | None = None
    """Writes the output as a line of an OpenAI batch has it; None where the row is none."""
    num_truncated: int = 0
    """Tokens of the row's text that are not in the request."""


class RowExecutor(Protocol):
    """Runs rows, in any order."""

    @property
    def loaded(self) -> Loaded: ...

    @property
    def num_generated_tokens(self) -> int: ...

    def counts(self) -> Counts: ...

    def steps(self, next_row: Callable[[], PromptRow | None], seed: int | None) -> Generator[list[Record], None, None]:
        """Yield the records of rows as they finish, an empty list where none has for a moment, until there is no row.

        `next_row` is called when a place is free, and returns None where there is no row now. `seed`: of the rows that name none.
        """


class EngineRows(ABC):
    """Runs rows over one engine. A task says what a row asks of it and what becomes of its output."""

    def __init__(self, engine: Engine, loaded: Loaded) -> None:
        self.engine = engine
        self.loaded = loaded

    @classmethod
    @abstractmethod
    def load(
        cls, run: RunConfig, progress: report.ProgressSink = report.NO_PROGRESS, rows: Iterable[PromptRow] = ()
    ) -> "EngineRows":
        """Load the model of `run`. Raises UserError for whatever is wrong with it, and for settings that no row could be run with.

        `rows`: where an error can name a number that fits these, it does.
        """

    @abstractmethod
    def ask(self, row: PromptRow, seed: int | None) -> RowRequest:
        """Return the request of a row. What it raises becomes the row's error."""

    @abstractmethod
    def record(self, row: PromptRow, row_request: RowRequest, output: Output) -> Record:
        """Return what the journal keeps of a row that has finished: its `row`, and what else the job's files need."""

    @staticmethod
    @abstractmethod
    def failed(row: PromptRow, error: BaseException) -> Record:
        """Return what the journal keeps of a row that failed. Raises the exception again where it does not belong to the row."""

    @property
    def num_generated_tokens(self) -> int:
        return self.engine.num_generated_tokens

    def counts(self) -> Counts:
        """Return the counts of this process, with the memory of its ranks."""
        engine = self.engine
        peak = report.peak_memory_of(engine)
        return Counts(engine.num_generated_tokens, engine.speculator.counts, peak)

    def steps(self, next_row: Callable[[], PromptRow | None], seed: int | None) -> Generator[list[Record], None, None]:
        """Yield after each step the records of the rows that it finished, as a `RowExecutor` does."""
        taken: dict[int, tuple[PromptRow, RowRequest | None]] = {}

        def next_request() -> Request | Output | None:
            row = next_row()
            if row is None:
                return None
            try:
                row_request = self.ask(row, seed)
            except BaseException as error:
                taken[row.index] = row, None
                return Output(row.index, [], 0, 0, error=error)
            taken[row.index] = row, row_request
            return row_request.request

        with closing(self.engine.steps(next_request)) as steps:
            for outputs in steps:
                yield [self._record(*taken.pop(output.request_id), output) for output in outputs]

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
    """Return the journal's record of a row that failed. `failed`: what the task keeps of it."""
    return {"digest": row.digest, "num_cached_tokens": 0, **failed}
