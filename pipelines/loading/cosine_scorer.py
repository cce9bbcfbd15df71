"""Scores of pairs by an embedding model: the cosine similarity of a query's and a document's vectors.

Dimensions: E hidden channels.
"""

from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from conf.pooling import EmbedConfig, ScoreConfig
from conf.tasks import PredictConfig
from pipelines.engine import Engine, Output
from pipelines.engine.request import Pooling
from pipelines.jobs.prompt_encoder import EncodedPrompt
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.similarity import cosine_similarities
from pipelines.loading.embedder import Embedder
from pipelines.loading.model_source import ModelSource
from pipelines.loading.pooler import Pooler


class CosineScorer(Pooler):
    """Computes a score from each row, with the same bits as the server's /score. A row has two prompts."""

    section = "embed"

    def __init__(
        self, config: ScoreConfig, embed: EmbedConfig, predict: PredictConfig, source: ModelSource, engine: Engine
    ) -> None:
        super().__init__(predict, engine)
        if config != ScoreConfig():
            problem = "score.instruction is a reranker's, and this is an embedding model"
            raise UserError(f"{problem}: leave it out, or give embed.instruction")
        self._embedder = Embedder(embed, predict, source, engine)

    @property
    def pooling(self) -> Pooling:
        return self._embedder.pooling

    @property
    def settings(self) -> dict[str, Any]:
        instructions = {
            "query_instruction": self._embedder.query_instruction,
            "document_instruction": self._embedder.document_instruction,
        }
        return {**self._embedder.settings, **instructions}

    @property
    def num_values(self) -> int:
        return 1

    def encode(self, row: PromptRow) -> list[EncodedPrompt]:
        if row.error is not None:
            raise UserError(row.error)
        if row.pair is None:
            raise UserError(
                "an embedding model scores a query and a document: give both, or give task=embed, which writes vectors"
            )
        query, document = row.pair
        return [
            self._embedder.encode_text(self._embedder.query_instruction + query),
            self._embedder.encode_text(self._embedder.document_instruction + document),
        ]

    def values(self, output: Output) -> Tensor:
        """Return the similarity as float64 [1]."""
        vectors = [self._embedder.vector(pooled).tolist() for pooled in output.pooled]  # [2, E]
        return torch.tensor(cosine_similarities(vectors, [(0, 1)]), dtype=torch.float64)
