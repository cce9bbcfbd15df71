"""OpenAI's client with the served model: its requests are accepted, and its results are those of predict."""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
from pydantic import BaseModel

from conf.decoding import DecodeConfig
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from pipelines.python.text_pipeline import TextGenerationPipeline
from tests.helpers.cases import each
from tests.helpers.clients import PROMPT
from tests.helpers.server import served
from tests.helpers.serving import tiny_run
from tests.helpers.soft_prefixes import write_paddle

MESSAGES: Any = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(tiny_run(), 4)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By name: one of fewer tokens than a block, and one of more."""
    folder, lengths = tmp_path_factory.mktemp("prefixes"), {"story": 5, "poem": 17}
    for name, length in lengths.items():
        values = write_paddle(folder / f"{name}.npy", length, num_layers=4, channels=64)
        np.save(folder / f"{name}.npy", 9 * values.numpy())  # so large that a trained model's text changes
    return {name: str(folder / f"{name}.npy") for name in lengths}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, prefixes: dict[str, str]) -> Iterator[str]:
    # Hydra does not accept {...} under -O
    prefix_options = [f"+model.prefixes.{name}={path}" for name, path in prefixes.items()]
    folder = tmp_path_factory.mktemp("served") / "run"
    with served(folder, "decode.seed=5", "serve.response_store=memory", *prefix_options) as (_, url):
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def text_of(engine: Engine, prompt: str | list[int], **decode: Any) -> str | None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(prompt, True) if isinstance(prompt, str) else prompt
    (output,) = engine.generate([engine.request(0, ids, DecodeConfig(**decode))])
    return output.completions[0].text


def chat_text(engine: Engine, **decode: Any) -> str | None:
    assert engine.tokenizer is not None
    return text_of(engine, engine.tokenizer.encode_messages(MESSAGES, None)[1], **decode)


@pytest.mark.long
def test_completions_are_predicts(client: openai.OpenAI, engine: Engine) -> None:
    expected = text_of(engine, PROMPT, max_new_tokens=20, temperature=0.7, seed=3)
    asked: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0.7, "seed": 3}
    answer = client.completions.create(**asked)
    assert answer.choices[0].text == expected
    assert answer.system_fingerprint
    chunks = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_chats_are_predicts(client: openai.OpenAI, engine: Engine) -> None:
    expected = chat_text(engine, max_new_tokens=12, temperature=0.0)
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == expected
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == (answer.usage and answer.usage.completion_tokens)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.content == expected


def test_a_prefix_is_a_model(url: str, client: openai.OpenAI, prefixes: dict[str, str]) -> None:
    """The texts of every route are predict's after that prefix, also with concurrent requests and the prefix cache."""
    run = tiny_run()
    pipe = TextGenerationPipeline(replace(run, model=replace(run.model, prefixes=prefixes)))
    prompt = "Once upon a time there was a little girl who lived in a small house near a big dark forest. One day she"
    messages: Any = [{"role": "user", "content": "Tell me a story."}]
    names = "tiny", *prefixes
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    parents = {model.id: (model.model_extra or {})["parent"] for model in client.models.list()}
    assert parents == {"tiny": None, "poem": "tiny", "story": "tiny"}
    texts, cached = set[str](), list[bool]()
    for name in names * 2:
        prefix = None if name == "tiny" else name
        asked: Any = {"model": name, "temperature": 0}
        text, reply = (
            pipe(request, prefix=prefix, **options)[0]["text_generation_text"][0] for request in (prompt, messages)
        )
        answer = client.completions.create(**asked, prompt=prompt, max_tokens=12)
        assert (answer.model, answer.choices[0].text) == (name, text)
        chat = client.chat.completions.create(**asked, messages=messages, max_tokens=12)
        assert chat.choices[0].message.content == reply
        message = httpx.post(f"{url}/messages", json={**asked, "messages": messages, "max_tokens": 12}).json()
        assert message["content"][0]["text"] == reply
        texts |= {text, reply}
        details = answer.usage and answer.usage.prompt_tokens_details
        cached.append(bool(details and details.cached_tokens))
    assert len(texts) == 2 * len(names)
    assert cached == [False] * 3 + [True] * 3
    with pytest.raises(openai.NotFoundError, match="the model novel does not exist: there are tiny, poem, story"):
        client.completions.create(model="novel", prompt=prompt)


def test_the_async_client_streams_many_at_once(url: str, engine: Engine) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        asked: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 1, "seed": seed}
        chunks = await client.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(16)))

    texts = asyncio.run(all_at_once())
    assert texts == [text_of(engine, PROMPT, max_new_tokens=16, temperature=1.0, seed=seed) for seed in range(16)]


def test_streams_of_responses_have_no_places(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="leave Last-Event-ID out"):
        client.responses.create(model="tiny", input="Hi", extra_headers={"Last-Event-ID": ""})


def test_responses_are_chats(client: openai.OpenAI, engine: Engine) -> None:
    expected = chat_text(engine, max_new_tokens=12, temperature=0.0)
    asked: Any = {"model": "tiny", "input": MESSAGES, "max_output_tokens": 12, "temperature": 0, "store": False}
    assert client.responses.create(**asked).output_text == expected
    with client.responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == expected
    with pytest.raises(openai.BadRequestError, match="is not found: send the whole conversation") as caught:
        client.responses.create(**asked, previous_response_id="r")
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    del asked["store"]
    first = client.responses.create(**asked)
    more: Any = [{"role": "user", "content": "And 4 + 5?"}]
    continued = client.responses.create(**asked | {"input": more}, previous_response_id=first.id)
    whole = client.responses.create(**asked | {"input": [*MESSAGES, *first.to_dict()["output"], *more]})  # type: ignore[misc]
    assert continued.output_text == whole.output_text
    assert continued.usage is not None
    assert whole.usage is not None
    assert continued.usage.input_tokens == whole.usage.input_tokens
    assert continued.usage.input_tokens_details.cached_tokens > 0


class Ball(BaseModel):
    """A format that every text of an answer completes."""

    color: Literal["red", "blue", "dark green"]
    sizes: tuple[Literal[1, 2], Literal[3]] | None
    is_new: bool


@pytest.mark.long
def test_answers_are_parsed_into_classes(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Tom had a red ball."}], "max_tokens": 200}
    colors = set()
    for seed in range(4):
        (choice,) = client.chat.completions.parse(**asked, response_format=Ball, seed=seed).choices
        assert choice.message.parsed == Ball.model_validate_json(choice.message.content or "")
        colors.add(choice.message.parsed and choice.message.parsed.color)
        with client.chat.completions.stream(**asked, response_format=Ball, seed=seed) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed
    assert len(colors) > 1
    response = client.responses.parse(model="tiny", input="Tom had a red ball.", text_format=Ball)
    assert isinstance(response.output_parsed, Ball)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked | {"max_tokens": 2}, response_format=Ball)


@each("streams", [False, True])
@each(
    ("form", "pattern"),
    [
        ({"regex": "[ab]{2,5}x"}, "[ab]{2,5}x"),
        ({"choice": ["yes", "no", "今天"]}, "yes|no|今天"),
        ({"grammar": 'start: "a" ("b" | "c")'}, "a[bc]"),
        (
            {"json": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}},
            r"\[\s*[12],\s*[12]\s*\]",
        ),
    ],
)
def test_answers_have_the_form_that_is_asked_for(
    client: openai.OpenAI, form: dict[str, Any], pattern: str, streams: bool
) -> None:
    asked: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 100, "temperature": 1, "n": 4}
    answer = client.completions.create(**asked, stream=streams, extra_body={"structured_outputs": form})
    texts = dict.fromkeys(range(4), "")
    for part in answer if streams else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert all(re.fullmatch(pattern, text) for text in texts.values()), texts


@each(
    ("schema", "message"),
    [
        ({"type": "array", "uniqueItems": True}, 'keywords that are not supported: "uniqueItems": leave them out'),
        ({"properties": {f"p{i}": {} for i in range(3000)}}, "too big"),
        ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}, "$ref": "#/$defs/a"}, "circular"),
    ],
)
def test_schemas_that_cannot_be_kept_to_are_refused(client: openai.OpenAI, schema: Any, message: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form, stream=True)
    assert refused.value.param == "response_format"


def test_the_servers_seed_holds_where_a_request_gives_none(client: openai.OpenAI, engine: Engine) -> None:
    answer: Any = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, temperature=1)
    assert answer.seed == 5
    assert answer.choices[0].text == text_of(engine, PROMPT, max_new_tokens=16, temperature=1.0, seed=5)


def test_errors_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny") as missing:
        client.completions.create(model="other", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt=PROMPT, stop=["x"] * 17)  # type: ignore[call-overload]
    assert refused.value.param == "stop"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5000, stream=True)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="continues texts") as vectors:
        client.embeddings.create(model="tiny", input="a")
    assert vectors.value.param == "model"


@pytest.mark.long
def test_the_same_body_seed_and_fingerprint_give_the_same_after_a_restart(tmp_path: Path) -> None:
    """Also the rest of a dropped stream."""
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 1, "n": 2}
    wholes, places, rests = [], [], []
    for i in range(2):
        with served(tmp_path / f"run{i}") as (process, url):
            wholes.append(httpx.post(f"{url}/v1/completions", json=body).json())
            body["seed"] = wholes[0]["seed"]
            headers = {"Last-Event-ID": places[3][0] if places else ""}
            stream = httpx.post(f"{url}/v1/completions", json=body | {"stream": True}, headers=headers).text
            events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in stream.strip().split("\n\n")]
            assert events.pop()["data"] == "[DONE]"
            rests.append([json.loads(event["data"]) for event in events])
            places = places or [(event["id"], event) for event in events]
            process.send_signal(signal.SIGKILL)
    assert wholes[0]["choices"] == wholes[1]["choices"]
    assert wholes[0]["system_fingerprint"] == wholes[1]["system_fingerprint"]
    assert wholes[0]["seed"] == wholes[1]["seed"]
    first, rest = rests
    for index in range(2):
        texts = [
            "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)
            for chunks in (first[:4], rest, first)
        ]
        assert texts[0] + texts[1] == texts[2]
