"""Vectors from the engine's process equal those of `task=embed`."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig
from conf.serving import ServeConfig
from models.formats import open_tokenizer
from models.tokenizers import Tokenizer
from pipelines import pipeline
from pipelines.replicas.engine_process.client import EngineClient
from pipelines.server.api.conversation import Chat
from pipelines.server.api.embeddings import IN_ENGINE, EmbeddingRequest
from pipelines.server.api.errors import ApiError
from pipelines.server.api.generation import Generation
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import CompletionRequest
from pipelines.server.token_routes import embeddings
from tests.helpers.builders import REPOSITORY
from tests.helpers.embedding_models import write_qwen3_embedding
from tests.helpers.local_http import exchange_of
from tests.helpers.serving import run_async, serving

TEXTS = ["a cat sat on the mat", "dogs", ""]
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
            with pytest.raises(ApiError, match="shorten it") as caught:
                await answer(client, tokenizer, input=[[5] * 300])
            request, exchange = check_request(CompletionRequest, {"model": "tiny", "prompt": "a"}), exchange_of(client)
            with pytest.raises(ApiError, match="continues none"):
                Generation(request, [[5]], exchange.info, exchange.context, None)
            return [*bodies, many], caught.value

    (floats, packed, one, many), error = run_async(test())
    pipe = pipeline("embedding", model=str(tmp_path), dtype="float32", device="cpu")
    expected = pipe(TEXTS)
    assert np.array_equal(np.array([item["embedding"] for item in floats["data"]], np.float32), expected)
    vectors = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed["data"]]
    assert np.array_equal(np.array(vectors), expected)
    assert np.array_equal(np.array(one["data"][0]["embedding"], np.float32), expected[0])
    assert [item["index"] for item in floats["data"]] == [0, 1, 2]
    vectors = [item["embedding"] for item in many["data"]]
    assert np.array_equal(np.array(vectors, np.float32), pipe([{"prompt_token_ids": ids} for ids in MANY]))
    assert [item["index"] for item in many["data"]] == list(range(len(MANY)))
    assert many["usage"]["prompt_tokens"] == sum(map(len, MANY))
    assert floats["usage"]["prompt_tokens"] == floats["usage"]["total_tokens"] > 3
    assert (error.status, error.param, error.code) == (400, "input", "context_length_exceeded")


def test_texts_are_cut_where_the_task_cuts_them(tmp_path: Path) -> None:
    write_qwen3_embedding(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    run = RunConfig(model=ModelConfig(path=str(tmp_path), dtype=DType.float32), device=DeviceConfig(DeviceType.cpu))
    texts = ["dogs", "a cat sat on the mat " * 200]

    async def test() -> Any:
        async with serving(run) as client:
            return await answer(client, open_tokenizer(tmp_path), input=texts)

    body = run_async(test())
    expected = pipeline("embedding", model=str(tmp_path), dtype="float32", device="cpu")(texts)
    assert np.array_equal(np.array([item["embedding"] for item in body["data"]], np.float32), expected)
    assert 7 < body["usage"]["prompt_tokens"] <= 14


def test_a_model_without_vectors_says_so() -> None:
    async def test() -> None:
        async with serving() as client:
            with pytest.raises(ApiError, match="gives no vectors") as caught:
                await answer(client, open_tokenizer(REPOSITORY / "models" / "tiny"), input="a")
            assert caught.value.param == "model"

    run_async(test())
