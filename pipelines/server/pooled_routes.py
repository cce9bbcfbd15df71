"""The routes that read vectors, label outputs and scores of texts, without generation."""

import asyncio
from collections.abc import Sequence

from conf.errors import UserError
from pipelines.replicas.engine_process.client import EngineRefused
from pipelines.replicas.engine_process.frames import Pooled, Ready, SubmitPooled
from pipelines.server.api.answer_shapes import Classes, Embeddings, PooledOutputs, Ranking, Scores
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import bad_request
from pipelines.server.api.parsing import check_request
from pipelines.server.api.pooled_prompts import PooledBody, TextEncoder
from pipelines.server.api.pooling import (
    IN_ENGINE,
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


async def embeddings(body: EmbeddingRequest, session: EngineSession, chat: Chat) -> Result:
    """Compute embeddings of texts."""
    prompts = await _prompts(body, body.inputs, _pooling_model(session, "vector"), session, chat)
    vectors = await _pooled(prompts, session, "input")
    num_tokens = sum(map(len, prompts))
    return embedding_body(body, session.context.model, session.info.fingerprint, vectors, num_tokens)


async def classify(body: ClassifyRequest, session: EngineSession, chat: Chat) -> Result:
    """Return the labels of texts and their probabilities, in the format of vLLM's API."""
    model = _pooling_model(session, "labels")
    prompts, outputs = await _outputs(body, model, session, chat)
    activation = "none" if body.use_activation is False else model.activation
    probs = [probabilities(output, activation) for output in outputs]
    return classify_body(session.context, model, probs, sum(map(len, prompts)))


async def pooling(body: PoolingRequest, session: EngineSession, chat: Chat) -> Result:
    """Return the vectors or the label outputs of texts, in the format of vLLM's API."""
    model = _pooling_model(session, "vector", "labels")
    prompts, outputs = await _outputs(body, model, session, chat)
    if body.use_activation:
        outputs = [probabilities(output, model.activation) for output in outputs]
    return pooling_body(body, session.context, outputs, sum(map(len, prompts)))


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
    if body.use_activation is not None and model.pooled != "labels":
        raise bad_request("use_activation is a classifier's, which this model is not: leave it out", "use_activation")
    encoder = TextEncoder(model, chat.tokenizer, body, param)
    prompts = await _pair_prompts(body, encoder, model, chat, param)
    session.record.warnings += encoder.warnings
    outputs = await _pooled(prompts, session, param)
    num_tokens = sum(map(len, prompts))
    if model.pooled == "vector":
        return await asyncio.to_thread(body.pairs.cosines, outputs), num_tokens
    activation = "none" if body.use_activation is False else model.activation
    return [probabilities(output, activation)[0] for output in outputs], num_tokens


async def _pair_prompts(
    body: PairsRequest, encoder: TextEncoder, model: Ready, chat: Chat, param: str
) -> list[list[int]]:
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
            await chat.in_thread(len(text), encoder.text, text, instruction)
            for text, instruction in zip([*queries, *documents], instructions, strict=True)
        ]
    if len(queries) == 1:
        queries *= len(documents)
    try:
        return [
            await chat.in_thread(len(query) + len(document), encoder.pair, query, document)
            for query, document in zip(queries, documents, strict=True)
        ]
    except UserError as error:
        raise bad_request(str(error), param) from error


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


async def _outputs(
    body: PooledInputs, model: Ready, session: EngineSession, chat: Chat
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the prompts, and the output of each."""
    inputs = body.inputs
    if body.messages is None:
        prompts = await _prompts(body, inputs, model, session, chat)
    else:
        fields = body.model_dump(exclude_none=True, by_alias=True, include={"messages", "chat_template_kwargs"})
        fields |= {"model": session.context.model, "add_generation_prompt": False}
        prompts = [(await chat.encode(check_request(ChatRequest, fields))).token_ids]
    return prompts, await _pooled(prompts, session, "input" if body.messages is None else "messages")


async def _prompts(
    body: PooledBody, inputs: Sequence[Prompt], model: Ready, session: EngineSession, chat: Chat
) -> list[list[int]]:
    """Return the prompt of each input."""
    encoder = TextEncoder(model, chat.tokenizer, body, "input")
    prompts = [
        await chat.in_thread(len(prompt), encoder.text, prompt, model.instruction)
        if isinstance(prompt, str)
        else encoder.token_ids(prompt)
        for prompt in inputs
    ]
    session.record.warnings += encoder.warnings
    return prompts


async def _pooled(prompts: Sequence[list[int]], session: EngineSession, param: str) -> list[list[float]]:
    """Return the output of each prompt. The engine has IN_ENGINE of them at a time."""
    salt = cache_salt(session.context.key, None)
    outputs: list[list[float]] = []
    for first in range(0, len(prompts), IN_ENGINE):
        part = prompts[first : first + IN_ENGINE]
        session.submit([SubmitPooled(0, prompt, cache_salt=salt, **session.named._asdict()) for prompt in part])
        try:
            await session.accepted()
        except EngineRefused as refused:
            raise embedding_refusal(refused.message, param) from refused
        async for _ in session.deltas():
            pass
        outputs += [done.vector or [] for _, done in sorted(session.dones.items())]
    return outputs


def _in_engine(body: EmbeddingRequest | PooledInputs | PairsRequest) -> int:
    return min(body.num_prompts, IN_ENGINE)


POOLED_ROUTES = (
    Route(EmbeddingRequest, embeddings, Embeddings, "embd-", _in_engine),
    Route(ClassifyRequest, classify, Classes, "classify-", _in_engine),
    Route(PoolingRequest, pooling, PooledOutputs, "pool-", _in_engine),
    Route(RerankRequest, rerank, Ranking, "rerank-", _in_engine),
    Route(ScoreRequest, score, Scores, "score-", _in_engine),
)
