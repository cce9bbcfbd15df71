"""Requests and answers of /v1/rerank and /v1/score, in the formats of vLLM's API."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import Field

from pipelines.jobs.similarity import cosine_similarities
from pipelines.server.api.errors import bad_request
from pipelines.server.api.generation import RequestContext
from pipelines.server.api.pooled_prompts import MAX_INPUTS, PooledBody, Texts
from pipelines.server.api.pooling import list_body
from pipelines.server.api.requests import NumTokens, Shape


class DocumentText(Shape):
    """A document in the format of Jina's API."""

    text: str


Documents: TypeAlias = Annotated[list[str | DocumentText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class Pairs(NamedTuple):
    """One query with each document, or as many queries as documents."""

    queries: list[str]
    documents: list[str]

    def cosines(self, vectors: Sequence[Sequence[float]]) -> list[float]:
        """Return the cosine similarity of each pair, from the vectors of [*queries, *documents]."""
        num_queries = len(self.queries)
        pairs = [(j if num_queries > 1 else 0, num_queries + j) for j in range(len(self.documents))]
        return cosine_similarities(vectors, pairs)


class PairsRequest(PooledBody):
    """Base of the requests with pairs of a query and a document."""

    max_tokens_per_query: NumTokens | None = None
    """Maximum tokens of a query, which is cut before the pair is made. None or 0: no limit."""
    max_tokens_per_doc: NumTokens | None = None
    """The same for a document."""
    use_activation: bool | None = None
    """Whether a label's output becomes a probability. The default is true."""

    @cached_property
    @abstractmethod
    def pairs(self) -> Pairs:
        """The texts. Raises ApiError for two names of a field, and for numbers of texts that do not match."""

    @property
    def num_prompts(self) -> int:
        """The number of prompts of an embedding model. A reranker has one for each document."""
        return len(self.pairs.queries) + len(self.pairs.documents)


class RerankRequest(PairsRequest):
    """A query, and documents to sort by their score with it."""

    path = "/v1/rerank"
    aliases = ("/rerank", "/v2/rerank")

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Number of results. None, or 0 as in vLLM's API: all documents."""
    return_documents: bool | None = None
    """Whether results contain the texts. The default is true."""

    @cached_property
    def pairs(self) -> Pairs:
        texts = [document if isinstance(document, str) else document.text for document in self.documents]
        return Pairs([self.query], texts)


class ScoreRequest(PairsRequest):
    """Pairs of texts: one with each of N texts, or N with N."""

    path = "/v1/score"
    aliases = ("/score",)

    queries: Texts | None = None
    documents: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    items: Texts | None = None
    """Other names of `queries` and `documents`."""

    @cached_property
    def pairs(self) -> Pairs:
        queries = self._one_of("queries", "text_1", "data_1")
        documents = self._one_of("documents", "text_2", "data_2", "items")
        if len(queries) not in (1, len(documents)):
            raise bad_request(
                f"queries has {len(queries)} texts and documents {len(documents)}: give one query, or one for each document",
                "queries",
            )
        return Pairs(queries, documents)

    def _one_of(self, *names: str) -> list[str]:
        """Return the texts of the only one of these fields that is given. Raises ApiError."""
        given = [texts for name in names if (texts := getattr(self, name)) is not None]
        if len(given) != 1:
            raise bad_request(f"give one of {', '.join(names)}", names[0])
        return [given[0]] if isinstance(given[0], str) else given[0]


def rerank_body(
    request: RerankRequest, context: RequestContext, scores: list[float], num_tokens: int
) -> dict[str, Any]:
    """Return the answer. The first of equal documents comes first."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: request.top_n or None]
    texts = request.pairs.documents if request.return_documents is not False else None
    return {
        "id": context.id,
        "model": context.model,
        "results": [
            {"index": i, "relevance_score": scores[i]} | ({"document": {"text": texts[i]}} if texts else {})
            for i in order
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def score_body(context: RequestContext, scores: list[float], num_tokens: int) -> dict[str, Any]:
    """Return the answer."""
    data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]
    return list_body(context, data, num_tokens)
