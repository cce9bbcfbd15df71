"""Poolers: make the requests of a row, and read an embedding or scores from the outputs."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.tasks import PredictConfig
from pipelines.engine import Engine, Output
from pipelines.engine.request import Pooling
from pipelines.jobs.prompt_encoder import EncodedPrompt
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import RowRequest


class Pooler(ABC):
    """Makes the requests of a row, and reads its embedding or scores from the output."""

    section: ClassVar[str]
    """The section of the config that has `settings`."""

    def __init__(self, predict: PredictConfig, engine: Engine) -> None:
        """`predict`: how rows run. Raises UserError for an unknown prefix."""
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
        """Resolved settings of the section that determine the numbers, by name."""

    @property
    @abstractmethod
    def num_values(self) -> int:
        """Numbers per row."""

    @abstractmethod
    def encode(self, row: PromptRow) -> list[EncodedPrompt]:
        """Return the row's prompts. Raises UserError for a row that cannot be run."""

    def without_padding(self, token_ids: list[int]) -> list[int]:
        """Return the tokens up to the last one whose output counts."""
        return token_ids

    @abstractmethod
    def values(self, output: Output) -> Tensor:
        """Return the numbers of a finished row. `output`: of all its requests, joined by `RowOutputs`."""

    def request(self, row: PromptRow, decode: DecodeConfig) -> RowRequest:
        """Return the request of each of the row's prompts. The row's settings override `decode`.

        Raises UserError for a row that cannot be run.
        """
        prompts = self.encode(row)
        if row.prediction is not None:
            raise UserError("a prediction is not used where nothing is generated: leave it out")
        settings = decode.replaced(row.decode)
        prefix = self._prefix if row.prefix is None else row.prefix
        adapter = self._adapter if row.adapter is None else row.adapter
        request, *more = (
            self.engine.pooled_request(row.index, prompt.token_ids, self.pooling, settings, prefix, adapter)
            for prompt in prompts
        )
        num_truncated = sum(prompt.num_truncated for prompt in prompts)
        return RowRequest(request, replace(prompts[0], num_truncated=num_truncated), more=tuple(more))
