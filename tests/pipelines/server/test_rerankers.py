"""Served classifiers and rerankers: the numbers of transformers and of `task=score`, cut texts, and refused requests."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig
from conf.serving import ServeConfig
from models.formats import open_tokenizer
from pipelines import pipeline
from pipelines.replicas.engine_process.client import EngineClient
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import ApiError
from pipelines.server.api.parsing import check_request
from pipelines.server.routes import ROUTES
from tests.helpers.cases import each
from tests.helpers.embedding_models import PAIR_TEMPLATE, write_qwen3_reranker, write_reward_model
from tests.helpers.fake_engine import FakeEngine, ready_for
from tests.helpers.local_http import ask, exchange_of, service_of
from tests.helpers.serving import run_async, serving

TOLERANCE = 1e-5  # float32 sums in another order; numbers are of order 1
TEXTS = ["a cat sat on the mat", "今天天气很好", "", "dogs " * 9]

Asker = Callable[..., Coroutine[Any, Any, Any]]


def served(folder: Path, test: Callable[[Asker], Coroutine[Any, Any, None]]) -> None:
    """Serve the model and run `test` with a function that returns the answer of a route."""
    run = RunConfig(model=ModelConfig(path=str(folder), dtype=DType.float32), device=DeviceConfig(DeviceType.cpu))

    async def ask_route(client: EngineClient, chat: Chat, path: str, body: dict[str, Any]) -> Any:
        exchange = exchange_of(client)
        try:
            return await ROUTES[path].answer(check_request(ROUTES[path].kind, body), exchange, chat)
        finally:
            exchange.end()

    async def main() -> None:
        chat = Chat(open_tokenizer(folder), ServeConfig())
        try:
            async with serving(run) as client:
                await test(lambda path, **body: ask_route(client, chat, path, {"model": "tiny", **body}))
        finally:
            chat.close()

    run_async(main())


@each("num_labels", [1, 3])
@pytest.mark.long
def test_a_classifier(num_labels: int, tmp_path: Path) -> None:
    names = {str(i): name for i, name in enumerate("bad fair good".split()[:num_labels])}
    reference = write_reward_model(tmp_path, PAIR_TEMPLATE, num_labels=num_labels, id2label=names)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def logits(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            outputs: torch.Tensor = reference(torch.tensor([token_ids])).logits[0]
        return outputs

    def pair_ids(query: str, document: str) -> list[int]:
        turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        ids: list[int] = tokenizer.apply_chat_template(turns, return_dict=False)
        return ids

    expected = [logits(tokenizer(text).input_ids or [0]) for text in TEXTS]
    probs = [outputs.softmax(0) if num_labels > 1 else outputs.sigmoid() for outputs in expected]

    async def test(ask: Asker) -> None:
        classes = await ask("/classify", input=TEXTS)
        for item, want in zip(classes["data"], probs, strict=True):
            assert item["probs"] == pytest.approx(want.tolist(), abs=TOLERANCE)
            assert (item["label"], item["num_classes"]) == (names[str(int(want.argmax()))], num_labels)
        raw = await ask("/classify", input=TEXTS[0], use_activation=False)
        assert raw["data"][0]["probs"] == pytest.approx(expected[0].tolist(), abs=TOLERANCE)
        pooled = await ask("/pooling", input=TEXTS)
        for item, outputs in zip(pooled["data"], expected, strict=True):
            assert item["data"] == pytest.approx(outputs.tolist(), abs=TOLERANCE)
        turns = [{"role": "user", "content": "hi"}]
        of_turns = (await ask("/pooling", messages=turns))["data"][0]["data"]
        want = logits(tokenizer.apply_chat_template(turns, return_dict=False))
        assert of_turns == pytest.approx(want.tolist(), abs=TOLERANCE)
        with pytest.raises(ApiError, match="continues none"):
            await ask("/v1/completions", prompt="a")
        if num_labels > 1:
            with pytest.raises(ApiError, match="this model has 3 labels, and a score needs one: ask /classify"):
                await ask("/score", queries="a", documents="b")
            return
        scores = [logits(pair_ids("Where?", text)).item() for text in TEXTS]
        answer = await ask("/score", queries="Where?", documents=TEXTS, use_activation=False)
        assert [item["score"] for item in answer["data"]] == pytest.approx(scores, abs=TOLERANCE)
        ranking = (await ask("/rerank", query="Where?", documents=TEXTS))["results"]
        order = sorted(range(len(TEXTS)), key=lambda i: -scores[i])
        assert [result["index"] for result in ranking] == order
        shares = torch.tensor(scores)[order].sigmoid().tolist()
        assert [result["relevance_score"] for result in ranking] == pytest.approx(shares, abs=TOLERANCE)

    served(tmp_path, test)


@pytest.mark.long
def test_a_causal_model_scores_and_generates(tmp_path: Path) -> None:
    write_qwen3_reranker(tmp_path)
    rows = [{"query": "Where?", "document": text} for text in TEXTS]
    expected = pipeline("score", model=str(tmp_path), dtype="float32", device="cpu")(rows)[:, 0].tolist()

    async def test(ask: Asker) -> None:
        answer = await ask("/score", queries="Where?", documents=TEXTS)
        assert [item["score"] for item in answer["data"]] == expected
        each_query = await ask("/score", queries=["Where?"] * 4, documents=TEXTS)
        assert [item["score"] for item in each_query["data"]] == expected
        completion = await ask("/v1/completions", prompt=[5, 6], max_tokens=3, temperature=0)
        assert completion["usage"]["completion_tokens"] == 3
        cut = await ask("/score", queries="Where?", documents="dogs " * 400, truncate_prompt_tokens=300)
        assert 290 < cut["usage"]["prompt_tokens"] <= 300  # whole tokens of the document are dropped
        left = await ask("/score", queries="Where?", documents="cats " + "dogs " * 400, truncate_prompt_tokens=300,
                         truncation_side="left")  # fmt: skip
        assert 290 < left["usage"]["prompt_tokens"] <= 300
        short = await ask("/score", queries="Where?", documents="dogs " * 400, max_tokens_per_doc=2)
        two = await ask("/score", queries="Where?", documents="dogs "[:5])
        assert short["usage"]["prompt_tokens"] <= two["usage"]["prompt_tokens"] + 2
        for body, message in (
            ({"queries": "a", "documents": "dogs " * 4000}, "shorten it"),
            ({"queries": "a", "documents": "b", "truncate_prompt_tokens": 200}, "tokens without a document, more than"),
            ({"queries": "a", "documents": "b", "use_activation": True}, "use_activation is a classifier's"),
        ):
            with pytest.raises(ApiError, match=message):
                await ask("/score", **body)
        with pytest.raises(ApiError, match="scores pairs by its tokens yes and no: ask a ...ForSequenceClassification"):
            await ask("/classify", input="a")

    served(tmp_path, test)


def test_cut_texts_are_told() -> None:
    """The fake engine's vector is the number and the sum of a text's tokens."""
    for path, body, limit in (
        ("/v1/embeddings", {"input": ["a cat sat on the mat", "a"]}, 3),
        ("/v1/embeddings", {"input": [[5, 6, 7, 8]]}, 3),
        ("/pooling", {"input": "a cat sat on the mat"}, 3),
        ("/pooling", {"messages": [{"role": "user", "content": "a cat sat on the mat"}]}, 3),
        ("/classify", {"input": "a cat " * 300}, -1),
        ("/rerank", {"query": "a cat sat on the mat", "documents": ["a"]}, 3),
    ):
        engine = FakeEngine(**ready_for(path))
        answer = ask("POST", path, service_of(engine), json={"model": "tiny", **body, "truncate_prompt_tokens": limit})
        assert answer.status_code == 200, answer.text
        assert "1 texts were cut" in answer.headers["x-quintet-warning"]
        assert max(len(submit.prompt_token_ids) for submit in engine.submitted) == (64 if limit == -1 else limit)
    engine = FakeEngine(**ready_for("/pooling"))
    body = {"input": [[5, 6, 7, 8]], "truncate_prompt_tokens": 2, "truncation_side": "left"}
    assert ask("POST", "/pooling", service_of(engine), json=body).status_code == 200
    assert engine.submitted[0].prompt_token_ids == [7, 8]
    for body, param in (
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"input": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"input": "a", "use_activation": True}, "use_activation"),
        ({"input": "a", "use_activation": False}, "use_activation"),
    ):
        error = ask("POST", "/pooling", service_of(engine), json=body).json()["error"]
        assert error["param"].startswith(param)
