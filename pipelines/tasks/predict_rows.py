"""Predictions from the rows of `task=predict`. With parallel=ray they are computed in Ray's workers."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from conf.errors import UserError
from conf.schema import RunConfig
from pipelines.engine import Output
from pipelines.engine.faults import row_error
from pipelines.engine.request import FinishReason
from pipelines.jobs import report
from pipelines.jobs.prompt_encoder import PromptEncoder
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import ANSWER, EngineRows, Loaded, Record, Row, RowRequest
from pipelines.jobs.text_generator import TextGenerator
from pipelines.loading.fingerprint import answer_fingerprint, fingerprint
from pipelines.loading.load_engine import open_engine

if TYPE_CHECKING:
    from pipelines.server.batches.requests import BatchRequests


class PredictRows(EngineRows):
    """Computes predictions from prompts."""

    def __init__(
        self, generator: TextGenerator, loaded: Loaded, open_batch: "Callable[[int | None], BatchRequests]"
    ) -> None:
        """`open_batch`: makes the converter for lines of OpenAI batches, from the seed of rows that do not set a seed.

        It raises UserError if the run cannot take such lines.
        """
        super().__init__(generator.engine, loaded)
        self._generator = generator
        self._open_batch = open_batch
        self._batch: BatchRequests | None = None  # set at the first line of a batch

    @classmethod
    def load(
        cls, run: RunConfig, progress: report.ProgressSink = report.NO_PROGRESS, rows: Iterable[PromptRow] = ()
    ) -> "PredictRows":
        source, engine = open_engine(run, run.predict.batch_size, progress)
        run = replace(run, decode=engine.requests.resolve(run.decode))
        engine.requests.check(run.decode)
        engine.requests.prefix(run.predict.prefix)
        settings = run.predict
        encoder = PromptEncoder(
            engine.tokenizer,
            settings.add_special_tokens,
            settings.chat_template,
            truncate=settings.truncate,
            max_tokens=settings.max_prompt_tokens,
        )
        generator = TextGenerator(engine, encoder, settings.prefix, settings.adapter)
        generator.check_new_tokens(run.decode, rows)
        rows_of = fingerprint(run, source, engine)
        loaded = Loaded(run.decode, rows_of, engine.executor.weight_bytes, divergence=engine.divergence)

        def open_batch(seed: int | None) -> "BatchRequests":
            if settings.max_prompt_tokens is not None:
                raise UserError(
                    "predict.truncate is not used by lines of a batch: leave it out, or give rows of prompts"
                )
            from pipelines.server.batches.requests import BatchRequests  # here: only batches need pydantic

            decode = replace(run.decode, seed=seed)
            serve = replace(run.serve, chat_template=settings.chat_template)
            bits = answer_fingerprint(replace(run, decode=decode, serve=serve), source, engine)
            return BatchRequests(generator, run.model, serve, decode, bits)

        return cls(generator, loaded, open_batch)

    def ask(self, row: PromptRow, seed: int | None) -> RowRequest:
        if row.batch is None:
            return self._generator.request(row, self.loaded.decode, seed)
        self._batch = self._batch or self._open_batch(seed)
        return self._batch.ask(row)

    def record(self, row: PromptRow, row_request: RowRequest, output: Output) -> Record:
        answer = {ANSWER: row_request.answer(output)} if row_request.answer else {}
        result = {"index": row.index, "id": row.id, **self._generator.result(row_request, output), "error": None}
        return {"row": result, **_source(row), **answer}

    @staticmethod
    def failed(row: PromptRow, error: BaseException) -> Record:
        prediction = _error_prediction(row, error)
        if row.batch is None:
            return {"row": prediction, **_source(row)}
        from pipelines.server.batches.answers import refusal  # here: only batches need pydantic

        return {"row": prediction, ANSWER: refusal(row, error)}


def _error_prediction(row: PromptRow, error: BaseException) -> Row:
    """Return the result of a failed row. Raises `error` again if the row did not cause it."""
    return {
        "index": row.index,
        "id": row.id,
        "prompt": None if row.prompt is None else row.prompt.encode("utf-8", "replace").decode("utf-8"),
        "text": "",
        "token_ids": [],
        "finish_reason": FinishReason.error.value,
        "num_prompt_tokens": 0,
        "num_generated_tokens": 0,
        "error": row_error(error, row.index),
    }


def _source(row: PromptRow) -> Record:
    return {} if row.source is None else {"source": row.source}
