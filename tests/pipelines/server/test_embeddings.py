"""Vectors from the engine's process equal those of `task=embed`."""

import base64
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.compose import dump
from conf.pooling import EmbedConfig
from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig, Task
from conf.serving import ServeConfig
from conf.tasks import PredictConfig
from models.formats import open_tokenizer
from models.tokenizers import Tokenizer
from pipelines import pipeline
from pipelines.jobs.similarity import cosine_similarities
from pipelines.replicas.engine_process.client import EngineClient
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import ApiError
from pipelines.server.api.generation import Generation
from pipelines.server.api.parsing import check_request
from pipelines.server.api.pooled_prompts import TextEncoder
from pipelines.server.api.pooling import IN_ENGINE, EmbeddingRequest
from pipelines.server.api.ranking import ScoreRequest
from pipelines.server.api.requests import CompletionRequest
from pipelines.server.pooled_routes import embeddings, score
from pipelines.tasks.score import run_score
from tests.helpers.embedding_models import write_qwen3_embedding
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.local_http import ask, exchange_of, service_of
from tests.helpers.serving import run_async, serving

TEXTS = ["a cat sat on the mat", "dogs", "", "今天天气很好", "dogs " * 9]
MANY = [[3 + i % 50, 5 + i // 50] for i in range(2 * IN_ENGINE + 2)]
"""More inputs than the engine has at a time, with different vectors."""


async def answer(client: EngineClient, tokenizer: Tokenizer, **fields: Any) -> Any:
    exchange, chat = exchange_of(client), Chat(tokenizer, ServeConfig())
    try:
        return await embeddings(check_request(EmbeddingRequest, {"model": "tiny", **fields}), exchange, chat)
    finally:
        exchange.end()
        chat.close()


@pytest.mark.long
def test_vectors_match_the_task(tmp_path: Path) -> None:
    write_qwen3_embedding(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype=DType.float32)
    run = RunConfig(model=model, device=DeviceConfig(DeviceType.cpu))

    async def test() -> Any:
        tokenizer = open_tokenizer(tmp_path)
        async with serving(run) as client:
            bodies = [
                await answer(client, tokenizer, input=TEXTS),
                await answer(client, tokenizer, input=TEXTS, encoding_format="base64"),
                await answer(client, tokenizer, input=TEXTS[0]),
            ]
            many = await answer(client, tokenizer, input=MANY)
            exchange, chat = exchange_of(client), Chat(tokenizer, ServeConfig())
            pair = check_request(ScoreRequest, {"model": "tiny", "queries": TEXTS[0], "documents": TEXTS[1:]})
            scores = await score(pair, exchange, chat)
            exchange.end()
            chat.close()
            with pytest.raises(ApiError, match="shorten it") as caught:
                await answer(client, tokenizer, input=[[5] * 300])
            request, exchange = check_request(CompletionRequest, {"model": "tiny", "prompt": "a"}), exchange_of(client)
            with pytest.raises(ApiError, match="continues none"):
                Generation(request, [[5]], exchange.info, exchange.context, None)
            return [*bodies, many, scores], caught.value

    (floats, packed, one, many, scores), error = run_async(test())
    pipe = pipeline("embedding", model=str(tmp_path), dtype="float32", device="cpu")
    expected = pipe(TEXTS)
    assert np.array_equal(np.array([item["embedding"] for item in floats["data"]], np.float32), expected)
    vectors = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed["data"]]
    assert np.array_equal(np.array(vectors), expected)
    assert np.array_equal(np.array(one["data"][0]["embedding"], np.float32), expected[0])
    assert [item["index"] for item in floats["data"]] == [0, 1, 2, 3, 4]
    queries, documents = pipe(TEXTS[0], instruction="query"), pipe(TEXTS[1:], instruction="document")
    cosines = documents @ queries[0]  # the vectors are normalised
    assert [item["score"] for item in scores["data"]] == pytest.approx(cosines.tolist(), abs=1e-6)  # float32 sums
    rows = [{"query": TEXTS[0], "document": text} for text in TEXTS[1:]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    predict = PredictConfig(data=str(tmp_path / "rows.jsonl"))
    run_score(replace(run, task=Task.score, predict=predict), tmp_path / "out", dump)
    lines = (tmp_path / "out" / "scores.jsonl").read_text().splitlines()
    assert [json.loads(line)["scores"] for line in lines] == [[item["score"]] for item in scores["data"]]
    vectors = [item["embedding"] for item in many["data"]]
    assert np.array_equal(np.array(vectors, np.float32), pipe([{"prompt_token_ids": ids} for ids in MANY]))
    assert [item["index"] for item in many["data"]] == list(range(len(MANY)))
    assert many["usage"]["prompt_tokens"] == sum(map(len, MANY))
    assert floats["usage"]["prompt_tokens"] == floats["usage"]["total_tokens"] > 3
    assert (error.status, error.param, error.code) == (400, "input", "context_length_exceeded")


def test_texts_are_cut_where_the_task_cuts_them(tmp_path: Path) -> None:
    write_qwen3_embedding(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    model, told = ModelConfig(path=str(tmp_path), dtype=DType.float32), EmbedConfig(instruction="a: ")
    run = RunConfig(Task.serve, model, device=DeviceConfig(DeviceType.cpu), embed=told)
    texts = ["dogs", "a cat sat on the mat " * 200]

    async def test() -> Any:
        async with serving(run) as client:
            return await answer(client, open_tokenizer(tmp_path), input=texts)

    body = run_async(test())
    pipe = pipeline("embedding", model=str(tmp_path), dtype="float32", device="cpu", instruction="a: ")
    assert np.array_equal(np.array([item["embedding"] for item in body["data"]], np.float32), pipe(texts))
    assert 7 < body["usage"]["prompt_tokens"] <= 14


def check_few_are_encoded_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a request has begun, the prompts of other requests do not make it fail."""
    engine, before, encode = FakeEngine(pooled="vector"), list[int](), TextEncoder.text
    service = service_of(engine, max_waiting_tokens=1000)

    def noting(encoder: TextEncoder, text: str, instruction: str) -> list[int]:
        before.append(len(engine.submitted))
        if len(before) == IN_ENGINE + 1:
            service.admission.wait(1001)
        return encode(encoder, text, instruction)

    monkeypatch.setattr(TextEncoder, "text", noting)
    documents = ["b"] * 2 * IN_ENGINE
    assert ask("POST", "/rerank", service, json={"query": "a", "documents": documents}).status_code == 200
    assert before == [i // IN_ENGINE * IN_ENGINE for i in range(len(documents) + 1)]
    small = service_of(FakeEngine(pooled="vector"), batch_size=2, max_waiting=3)  # takes five sequences at once
    answer = ask("POST", "/rerank", small, json={"query": "a", "documents": documents})
    assert len(answer.json()["results"]) == len(documents)


async def score_without_tokenizer() -> None:
    exchange, chat = exchange_of(FakeEngine(pooled="vector")), Chat(None, ServeConfig())
    with pytest.raises(ApiError, match="no tokenizer, which texts need: start it with model.tokenizer"):
        await score(check_request(ScoreRequest, {"queries": "a", "documents": "b"}), exchange, chat)
    chat.close()


def test_documents_are_sorted_and_pairs_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path of vLLM's API. The fake engine's vectors are the number and the sum of a text's tokens."""
    engine = FakeEngine(pooled="vector")
    texts = ["a cat", "", "dogs and cats", "a cat"]

    def asked(path: str, **body: Any) -> Any:
        engine.submitted.clear()
        answer = ask("POST", path, service_of(engine), json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranking = asked(path, query="a dog", documents=[*texts[:3], {"text": texts[3]}])
        vectors = [np.array((len(ids), sum(ids)), float) for ids in (s.prompt_token_ids for s in engine.submitted)]
        cosines = [float(v @ vectors[0] / (np.linalg.norm(v) * np.linalg.norm(vectors[0]))) for v in vectors[1:]]
        order = sorted(range(4), key=lambda i: (-cosines[i], i))
        assert [result["index"] for result in ranking["results"]] == order
        assert order.index(3) == order.index(0) + 1  # equal documents keep their order
        scores = [result["relevance_score"] for result in ranking["results"]]
        assert scores == pytest.approx([cosines[i] for i in order], abs=1e-12)  # float64
        assert [result["document"]["text"] for result in ranking["results"]] == [texts[i] for i in order]
        assert ranking["usage"]["prompt_tokens"] == sum(len(s.prompt_token_ids) for s in engine.submitted)
    short = asked("/rerank", query="a dog", documents=texts, top_n=2, return_documents=False)["results"]
    assert [(result["index"], "document" in result) for result in short] == [(i, False) for i in order[:2]]
    for top_n in (0, 4, 10**30):  # 0 is all, as in vLLM
        assert len(asked("/rerank", query="a dog", documents=texts, top_n=top_n)["results"]) == 4
    names_of_score = ("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items")
    for path, names in product(("/score", "/v1/score"), names_of_score):
        one = asked(path, **dict(zip(names, ("a dog", texts), strict=True)))["data"]
        assert [item["index"] for item in one] == [0, 1, 2, 3]
        assert [item["score"] for item in one] == pytest.approx(cosines, abs=1e-12)
        each = asked(path, **dict(zip(names, (texts, texts), strict=True)))["data"]
        assert [item["score"] for item in each] == pytest.approx([1.0] * 4, abs=1e-12)
    for body, message in (
        ({"queries": ["a", "b"], "documents": ["a"] * 3}, "queries has 2 texts and documents 3: give one query"),
        ({"queries": "a"}, "give one of documents, text_2, data_2, items"),
        ({"queries": "a", "text_1": "a", "documents": "b"}, "give one of queries, text_1, data_1"),
    ):
        answer = ask("POST", "/score", service_of(engine), json=body)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True)
    run_async(score_without_tokenizer())
    check_few_are_encoded_in_advance(monkeypatch)
    assert cosine_similarities([[0.0, 0.0], [1.0, 2.0]], [(0, 1)]) == [0.0]
    for path, body in (
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/embeddings", {"input": "a", "model": "tiny"}),
    ):
        error = ask("POST", path, service_of(FakeEngine()), json=body).json()["error"]
        assert (error["param"], "continues texts" in error["message"]) == ("model", True)
