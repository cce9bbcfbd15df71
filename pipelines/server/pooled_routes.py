"""The routes that read vectors, label outputs and scores of texts, without generation."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

from pipelines.replicas.engine_process.client import EngineRefused
from pipelines.replicas.engine_process.frames import Pooled, Ready, SubmitPooled
from pipelines.server.api.answer_shapes import Classes, Embeddings, PooledOutputs, Ranking, Scores
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import bad_request
from pipelines.server.api.parsing import check_request
from pipelines.server.api.pooled_prompts import PooledBody, TextEncoder
from pipelines.server.api.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PooledInputs,
    PoolingRequest,
    classify_body,
    embedding_body,
    embedding_refusal,
    pooling_body,
    probabilities,
)
from pipelines.server.api.ranking import (
    PairsRequest,
    RerankRequest,
    ScoreRequest,
    rerank_body,
    score_body,
)
from pipelines.server.api.requests import ChatRequest, Prompt
from pipelines.server.api.settings import cache_salt
from pipelines.server.engine_response import Result
from pipelines.server.engine_session import EngineSession
from pipelines.server.route import Route

Encoding: TypeAlias = Callable[[], Awaitable[list[int]]]
"""Encodes a prompt in a thread."""


async def embeddings(body: EmbeddingRequest, session: EngineSession, chat: Chat) -> Result:
    """Compute embeddings of texts."""
    model = _pooling_model(session, "vector")
    vectors, num_tokens = await _outputs(body, body.inputs, "input", model, session, chat)
    return embedding_body(body, session.context.model, session.info.fingerprint, vectors, num_tokens)


async def classify(body: ClassifyRequest, session: EngineSession, chat: Chat) -> Result:
    """Return the labels of texts and their probabilities, in the format of vLLM's API."""
    model = _pooling_model(session, "labels")
    inputs, param = await _inputs(body, session, chat)
    outputs, num_tokens = await _outputs(body, inputs, param, model, session, chat)
    activation = "none" if body.use_activation is False else model.activation
    probs = [probabilities(output, activation) for output in outputs]
    return classify_body(session.context, model, probs, num_tokens)


async def pooling(body: PoolingRequest, session: EngineSession, chat: Chat) -> Result:
    """Return the vectors or the label outputs of texts, in the format of vLLM's API."""
    model = _pooling_model(session, "vector", "labels")
    _check_activation(body, model)
    inputs, param = await _inputs(body, session, chat)
    outputs, num_tokens = await _outputs(body, inputs, param, model, session, chat)
    if body.use_activation:
        outputs = [probabilities(output, model.activation) for output in outputs]
    return pooling_body(body, session.context, outputs, num_tokens)


async def rerank(body: RerankRequest, session: EngineSession, chat: Chat) -> Result:
    """Sort documents by their score with the query, in the format of vLLM's API."""
    scores, num_tokens = await _scores(body, session, chat, "documents")
    return rerank_body(body, session.context, scores, num_tokens)


async def score(body: ScoreRequest, session: EngineSession, chat: Chat) -> Result:
    """Return the score of each pair of texts, in the format of vLLM's API."""
    scores, num_tokens = await _scores(body, session, chat, "queries or documents")
    return score_body(session.context, scores, num_tokens)


async def _scores(body: PairsRequest, session: EngineSession, chat: Chat, param: str) -> tuple[list[float], int]:
    """Return the score of each pair, and the number of tokens of all prompts.

    The score is the cosine similarity of an embedding model's vectors, the probability of yes by a causal model, or the
    output of a classifier's only label.
    """
    model = _pooling_model(session, "vector", "labels", "answer")
    if model.pooled == "labels" and len(model.labels) != 1:
        problem = f"this model has {len(model.labels)} labels, and a score needs one"
        raise bad_request(f"{problem}: ask /classify, or a reranker", "model")
    _check_activation(body, model)
    encoder = TextEncoder(model, chat.tokenizer, body, param)
    outputs, num_tokens = await _pooled(await _pair_prompts(body, encoder, model, chat), encoder, session)
    if model.pooled == "vector":
        return await asyncio.to_thread(body.pairs.cosines, outputs), num_tokens
    activation = "none" if body.use_activation is False else model.activation
    return [probabilities(output, activation)[0] for output in outputs], num_tokens


async def _pair_prompts(body: PairsRequest, encoder: TextEncoder, model: Ready, chat: Chat) -> list[Encoding]:
    """Return a prompt of each text for an embedding model, else a prompt of each pair."""
    pairs = body.pairs

    async def cut(texts: list[str], most: int | None) -> list[str]:
        return [await chat.in_thread(len(text), encoder.cut, text, most) for text in texts] if most else texts

    queries, documents = (
        await cut(pairs.queries, body.max_tokens_per_query),
        await cut(pairs.documents, body.max_tokens_per_doc),
    )
    if model.pooled == "vector":
        instructions = [model.query_instruction] * len(queries) + [model.document_instruction] * len(documents)
        return [
            partial(chat.in_thread, len(text), encoder.text, text, instruction)
            for text, instruction in zip([*queries, *documents], instructions, strict=True)
        ]
    if len(queries) == 1:
        queries *= len(documents)
    return [
        partial(chat.in_thread, len(query) + len(document), encoder.pair, query, document)
        for query, document in zip(queries, documents, strict=True)
    ]


def _check_activation(body: PooledInputs | PairsRequest, model: Ready) -> None:
    if body.use_activation is not None and model.pooled != "labels":
        raise bad_request("use_activation is a classifier's, which this model is not: leave it out", "use_activation")


def _pooling_model(session: EngineSession, *kinds: Pooled) -> Ready:
    """Return the model. Raises ApiError if its pooled prompts give something else than one of `kinds`."""
    model = session.info
    if model.pooled in kinds:
        return model
    gives = {
        "vector": "this model gives vectors of texts",
        "labels": "this model gives outputs of labels",
        "answer": "this model continues texts, and scores pairs by its tokens yes and no",
        None: "this model continues texts, and its tokenizer has no tokens yes and no",
    }[model.pooled]
    needed = {"vector": "an embedding model", "labels": "a ...ForSequenceClassification", "answer": "a reranker"}
    raise bad_request(f"{gives}: ask {' or '.join(needed[kind] for kind in kinds)}", "model")


async def _inputs(body: PooledInputs, session: EngineSession, chat: Chat) -> tuple[list[Prompt], str]:
    """Return the inputs and the name of their field. A conversation becomes the tokens of its prompt."""
    inputs = body.inputs
    if body.messages is None:
        return inputs, "input"
    fields = body.model_dump(exclude_none=True, by_alias=True, include={"messages", "chat_template_kwargs"})
    fields |= {"model": session.context.model, "add_generation_prompt": False}
    most = session.info.context_length if body.truncate_prompt_tokens is None else None
    prompt = await chat.encode(check_request(ChatRequest, fields), most)
    session.record.warnings += prompt.warnings
    return [prompt.token_ids], "messages"


async def _outputs(
    body: PooledBody, inputs: Sequence[Prompt], param: str, model: Ready, session: EngineSession, chat: Chat
) -> tuple[list[list[float]], int]:
    """Return the output of each input, and the number of tokens of all prompts."""
    encoder = TextEncoder(model, chat.tokenizer, body, param)
    prompts: list[Encoding] = [
        partial(chat.in_thread, len(prompt), encoder.text, prompt, model.instruction)
        if isinstance(prompt, str)
        else partial(chat.in_thread, 0, encoder.token_ids, prompt)
        for prompt in inputs
    ]
    return await _pooled(prompts, encoder, session)


async def _pooled(
    prompts: Sequence[Encoding], encoder: TextEncoder, session: EngineSession
) -> tuple[list[list[float]], int]:
    """Return the output of each prompt, and the number of tokens of all prompts.

    Prompts are encoded and computed in parts, because together they may be much longer than the body: each pair has the
    whole query.
    """
    salt, num_tokens = cache_salt(session.context.key, None), 0
    outputs: list[list[float]] = []
    for first in range(0, len(prompts), session.max_part):
        part = [await encode() for encode in prompts[first : first + session.max_part]]
        num_tokens += sum(map(len, part))
        session.submit([SubmitPooled(0, prompt, cache_salt=salt, **session.named._asdict()) for prompt in part])
        try:
            await session.accepted()
        except EngineRefused as refused:
            raise embedding_refusal(refused.message, encoder.param) from refused
        async for _ in session.deltas():
            pass
        outputs += [done.vector or [] for _, done in sorted(session.dones.items())]
    session.record.warnings += encoder.warnings
    return outputs, num_tokens


def _num_prompts(body: EmbeddingRequest | PooledInputs | PairsRequest) -> int:
    return body.num_prompts


POOLED_ROUTES = (
    Route(EmbeddingRequest, embeddings, Embeddings, "embd-", _num_prompts, in_parts=True),
    Route(ClassifyRequest, classify, Classes, "classify-", _num_prompts, in_parts=True),
    Route(PoolingRequest, pooling, PooledOutputs, "pool-", _num_prompts, in_parts=True),
    Route(RerankRequest, rerank, Ranking, "rerank-", _num_prompts, in_parts=True),
    Route(ScoreRequest, score, Scores, "score-", _num_prompts, in_parts=True),
)
