"""Poolers: make the request of a row, and read an embedding or scores from the output."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.pooling import EmbedConfig, ScoreConfig
from conf.schema import RunConfig
from conf.tasks import PredictConfig
from models.heads import HeadKind
from pipelines.engine import Engine, Output
from pipelines.engine.request import Pooling
from pipelines.engine.request_factory import check_pooled
from pipelines.jobs import report
from pipelines.jobs.prompt_encoder import EncodedPrompt
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import RowRequest
from pipelines.loading.load_engine import open_engine
from pipelines.loading.model_source import ModelSource, OpenModel


class Pooler(ABC):
    """Makes the request of a row, and reads its embedding or scores from the output."""

    head: ClassVar[HeadKind | None]
    """The head that the model needs, as for `resolve_model`."""

    def __init__(
        self, config: EmbedConfig | ScoreConfig, predict: PredictConfig, source: ModelSource, engine: Engine
    ) -> None:
        """`config`: the section of the task. `predict`: how rows run. Raises UserError for settings that contradict the
        checkpoint.
        """
        self.engine = engine
        self._prefix, self._adapter = predict.prefix, predict.adapter
        engine.requests.prefix(self._prefix)

    @property
    @abstractmethod
    def pooling(self) -> Pooling:
        """Return the pooling of a row's outputs."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Resolved settings of the task that determine the numbers, by name."""

    @property
    @abstractmethod
    def num_values(self) -> int:
        """Numbers per row."""

    @abstractmethod
    def encode(self, row: PromptRow) -> EncodedPrompt:
        """Return the row's tokens. Raises UserError for a row that cannot be run."""

    def without_padding(self, token_ids: list[int]) -> list[int]:
        """Return the tokens up to the last one whose output counts."""
        return token_ids

    @abstractmethod
    def values(self, output: Output) -> Tensor:
        """Return the float32 numbers of a finished row."""

    def request(self, row: PromptRow, decode: DecodeConfig) -> RowRequest:
        """Return the request of a row. The row's settings override `decode`.

        Raises UserError for a row that cannot be run.
        """
        prompt = self.encode(row)
        if row.prediction is not None:
            raise UserError("a prediction is not used where nothing is generated: leave it out")
        settings = decode.replaced(row.decode)
        prefix = self._prefix if row.prefix is None else row.prefix
        adapter = self._adapter if row.adapter is None else row.adapter
        token_ids = prompt.token_ids
        return RowRequest(
            self.engine.pooled_request(row.index, token_ids, self.pooling, settings, prefix, adapter), prompt
        )


def open_pooler(
    make: type[Pooler],
    run: RunConfig,
    progress: report.ProgressSink = report.NO_PROGRESS,
    open_model: OpenModel | None = None,
) -> tuple[ModelSource, Pooler]:
    """Load the model of `run` with the head that the pooler needs. `open_model`: as for `load_engine`.

    Raises UserError as `load_engine` does, and for `decode` settings.
    """
    check_pooled(run.decode)
    source, engine = open_engine(run, run.predict.batch_size, progress, make.head, open_model)
    return source, make(getattr(run, run.task.name), run.predict, source, engine)
