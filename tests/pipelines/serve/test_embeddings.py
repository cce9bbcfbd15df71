"""Vectors through the engine's process are those of `task=embed`."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig
from models.formats import open_tokenizer
from pipelines import pipeline
from pipelines.api.errors import ApiError
from pipelines.api.requests import CompletionRequest, EmbeddingRequest, check_request
from pipelines.serve.client import EngineClient
from pipelines.serve.completions import CompletionAnswer
from pipelines.serve.embeddings import EmbeddingAnswer, encode_input
from pipelines.serve.submitted import Call
from tests.helpers.embedding_models import write_qwen3_embedding
from tests.helpers.serving import run_async, serving

TEXTS = ["a cat sat on the mat", "dogs", ""]


def answer(client: EngineClient, folder: Path, **fields: Any) -> EmbeddingAnswer:
    request = check_request(EmbeddingRequest, {"model": "tiny", **fields})
    tokenizer, ready = open_tokenizer(folder), client.info
    assert ready is not None

    prompts = [encode_input(ready, tokenizer, each) if isinstance(each, str) else each for each in request.inputs]
    return EmbeddingAnswer(Call(client, tokenizer, "embd-1", "tiny"), request, prompts)  # type: ignore[arg-type]


def test_vectors_are_those_of_the_task(tmp_path: Path) -> None:
    write_qwen3_embedding(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype=DType.float32)
    run = RunConfig(model=model, device=DeviceConfig(DeviceType.cpu))

    async def test() -> Any:
        async with serving(run) as client:
            bodies = [
                await answer(client, tmp_path, input=TEXTS).body(),
                await answer(client, tmp_path, input=TEXTS, encoding_format="base64").body(),
                await answer(client, tmp_path, input=TEXTS[0]).body(),
            ]
            long = answer(client, tmp_path, input=[[5] * 300])
            with pytest.raises(ApiError, match="shorten it") as caught:
                await long.accepted()
            request = check_request(CompletionRequest, {"model": "tiny", "prompt": "a"})
            with pytest.raises(ApiError, match="continues none"):
                CompletionAnswer(Call(client, None, "c", "tiny"), request, [[5]])  # type: ignore[arg-type]
            return bodies, caught.value

    (floats, packed, one), error = run_async(test())
    pipe = pipeline("embedding", model=str(tmp_path), dtype="float32", device="cpu")
    expected = pipe(TEXTS)
    assert np.array_equal(np.array([item["embedding"] for item in floats["data"]], np.float32), expected)
    vectors = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed["data"]]
    assert np.array_equal(np.array(vectors), expected)
    assert np.array_equal(np.array(one["data"][0]["embedding"], np.float32), expected[0])
    assert [item["index"] for item in floats["data"]] == [0, 1, 2]
    assert floats["usage"]["prompt_tokens"] == floats["usage"]["total_tokens"] > 3
    assert (error.status, error.param, error.code) == (400, "input", "context_length_exceeded")


def test_a_model_without_vectors_says_so() -> None:
    async def test() -> None:
        async with serving() as client:
            request = check_request(EmbeddingRequest, {"model": "tiny", "input": "a"})
            with pytest.raises(ApiError, match="gives no vectors") as caught:
                EmbeddingAnswer(Call(client, None, "e", "tiny"), request, [[5]])  # type: ignore[arg-type]
            assert caught.value.param == "model"

    run_async(test())
