"""Answers of completions and chat compared with the engine's outputs, whole and streamed."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from models.chat.entries import entries
from models.chat.reader import AnswerReader
from models.tokenizers import Tokenizer
from pipelines.engine import Engine, Output
from pipelines.loading.load_engine import load_engine
from pipelines.replicas.engine_process.client import EngineClient
from pipelines.server.api.errors import ApiError
from pipelines.server.api.generation import Generation
from pipelines.server.api.message_reader import CallIds, MessageReader
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import ChatRequest, CompletionRequest, Sampling
from pipelines.server.api.writers import ChatWriter, CompletionWriter
from tests.helpers.cases import each
from tests.helpers.clients import PROMPT
from tests.helpers.local_http import answer_of, exchange_of
from tests.helpers.serving import serving, tiny_run
from tests.helpers.waiting import LIMIT_S


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(tiny_run(), 4)


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    assert engine.tokenizer is not None
    return engine.tokenizer


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[asyncio.Runner, EngineClient]]:
    """Return a loop, and the engine's process that it serves."""
    with asyncio.Runner() as runner:
        opened = serving()
        client = runner.run(opened.__aenter__())
        yield runner, client
        runner.run(opened.__aexit__(None, None, None))


class Asker:
    """Requests answers, and returns bodies or lists of events."""

    def __init__(self, server: tuple[asyncio.Runner, EngineClient], tokenizer: Tokenizer) -> None:
        self.runner, self.client = server
        self.tokenizer = tokenizer

    def completion(self, last_event_id: str | None = None, **fields: Any) -> Any:
        request = check_request(CompletionRequest, {"model": "tiny", "prompt": PROMPT, **fields})
        prompts = [self.tokenizer.encode(p, True) if isinstance(p, str) else p for p in request.prompts]
        return self._ask(request, prompts, lambda generation: CompletionWriter(generation, request), last_event_id)

    def chat(self, last_event_id: str | None = None, **fields: Any) -> Any:
        messages = [{"role": "user", "content": PROMPT}]
        request = check_request(ChatRequest, {"model": "tiny", "messages": messages, **fields})
        prompts = [self.tokenizer.encode(PROMPT, True)]

        def reader() -> MessageReader:
            return MessageReader(AnswerReader(entries()["text"].form), CallIds(entries()["text"].form, "", 0))

        return self._ask(request, prompts, lambda generation: ChatWriter(generation, request, reader), last_event_id)

    def _ask(self, request: Sampling, prompts: Any, make: Any, last_event_id: str | None) -> Any:
        async def ask() -> Any:
            exchange = exchange_of(self.client, last_event_id)
            generation = Generation(request, prompts, exchange.info, exchange.context, self.tokenizer)
            return await answer_of(exchange, generation, make(generation), bool(request.stream))

        return self.runner.run(asyncio.wait_for(ask(), LIMIT_S))


@pytest.fixture(scope="module")
def ask(server: tuple[asyncio.Runner, EngineClient], tokenizer: Tokenizer) -> Asker:
    return Asker(server, tokenizer)


def generate(engine: Engine, prompt: list[int], **decode: Any) -> Output:
    (output,) = engine.generate([engine.request(0, prompt, DecodeConfig(**decode))])
    return output


def text_of(events: list[Any], index: int = 0) -> str:
    return "".join(choice["text"] for event in events for choice in event.data["choices"] if choice["index"] == index)


def test_a_completion_is_what_the_engine_gives(ask: Asker, engine: Engine, tokenizer: Tokenizer) -> None:
    body = ask.completion(max_tokens=20, temperature=0.7, seed=3, n=2, return_token_ids=True)
    prompt = tokenizer.encode(PROMPT, True)
    output = generate(engine, prompt, max_new_tokens=20, temperature=0.7, seed=3, n=2)
    assert [choice["text"] for choice in body["choices"]] == [completion.text for completion in output.completions]
    assert [choice["token_ids"] for choice in body["choices"]] == [
        completion.token_ids for completion in output.completions
    ]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    num_generated = sum(len(completion.token_ids) for completion in output.completions)
    assert body["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_generated,
        "total_tokens": len(prompt) + num_generated,
        "prompt_tokens_details": None,
    }
    assert (body["object"], body["model"], body["seed"]) == ("text_completion", "tiny", 3)
    assert body["system_fingerprint"]


def test_an_answer_is_given_again_by_its_seed(ask: Asker) -> None:
    first = ask.completion(max_tokens=20, temperature=1)
    assert 0 <= first["seed"] < 2**53
    again = ask.completion(max_tokens=20, temperature=1, seed=first["seed"])
    assert (again["choices"], again["seed"]) == (first["choices"], first["seed"])
    assert again["system_fingerprint"] == first["system_fingerprint"]
    assert ask.completion(max_tokens=20, temperature=1)["choices"] != first["choices"]


def test_the_default_temperature_is_1(ask: Asker) -> None:
    default, one = (ask.completion(max_tokens=20, seed=7, **fields) for fields in ({}, {"temperature": 1}))
    assert default["choices"] == one["choices"]
    assert default["choices"] != ask.completion(max_tokens=20, seed=7, temperature=0)["choices"]


def test_a_negative_seed_is_the_number_of_the_same_bits(ask: Asker) -> None:
    negative = ask.completion(max_tokens=8, temperature=1, seed=-1)
    assert negative["seed"] == 2**64 - 1
    assert negative["choices"] == ask.completion(max_tokens=8, temperature=1, seed=2**64 - 1)["choices"]


def test_log_probabilities_of_echo_are_the_engines(ask: Asker, engine: Engine, tokenizer: Tokenizer) -> None:
    body = ask.completion(max_tokens=6, temperature=0, logprobs=2, echo=True)
    prompt = tokenizer.encode(PROMPT, True)
    output = generate(engine, prompt, max_new_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=2)
    completion, (choice,) = output.completions[0], body["choices"]
    assert choice["text"] == PROMPT + str(completion.text)
    steps = [*(output.prompt_logprobs or []), *(completion.logprobs or [])]
    ids = [*prompt, *completion.token_ids]
    expected = [None, *(step.logprobs[id] for step, id in zip(steps, ids[1:], strict=True))]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == expected
    assert logprobs["top_logprobs"][0] is None
    for step, top in zip(steps, logprobs["top_logprobs"][1:], strict=True):
        assert sorted(top.values()) == sorted(step.logprobs.values())
    for token, offset, id in zip(logprobs["tokens"], logprobs["text_offset"], ids, strict=True):
        if tokenizer.token_bytes(id) is not None and not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token.lstrip(" ") if offset == 0 else token)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_a_prompt_is_scored_without_an_answer(ask: Asker, tokenizer: Tokenizer) -> None:
    scored = ask.completion(max_tokens=0, echo=True, logprobs=1, temperature=0)
    (choice,) = scored["choices"]
    longer = ask.completion(max_tokens=3, echo=True, logprobs=1, temperature=0)["choices"][0]
    num_prompt = len(tokenizer.encode(PROMPT, True))
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] == {name: values[:num_prompt] for name, values in longer["logprobs"].items()}
    assert scored["usage"]["completion_tokens"] == 0


@each("n", [1, 3])
def test_a_stream_of_a_completion_says_the_same(ask: Asker, n: int) -> None:
    fields = {"max_tokens": 24, "temperature": 0.9, "seed": 5, "n": n, "logprobs": 1, "return_token_ids": True}
    body = ask.completion(**fields)
    events = ask.completion(**fields, stream=True, stream_options={"include_usage": True})
    for index, choice in enumerate(body["choices"]):
        mine = [c for event in events for c in event.data["choices"] if c["index"] == index]
        assert text_of(events, index) == choice["text"]
        assert [id for c in mine for id in c["token_ids"]] == choice["token_ids"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        for name, values in choice["logprobs"].items():
            assert [value for c in mine if c["logprobs"] for value in c["logprobs"][name]] == values
    assert all(event.data["usage"] is None for event in events[:-1])
    assert events[-1].data["choices"] == []
    usage, expected = events[-1].data["usage"], body["usage"]
    assert usage | {"prompt_tokens_details": 0} == expected | {"prompt_tokens_details": 0}
    assert {event.data["seed"] for event in events} == {5}


def test_several_prompts_are_requests_of_their_own(ask: Asker, tokenizer: Tokenizer) -> None:
    prompts = ["Once upon", "The little dog", "I love"]
    fields = {"max_tokens": 9, "temperature": 1, "seed": 11, "n": 2}
    alone = [ask.completion(**fields, prompt=prompt) for prompt in prompts]
    together = ask.completion(**fields, prompt=prompts)
    expected = [choice["text"] for body in alone for choice in body["choices"]]
    assert [choice["text"] for choice in together["choices"]] == expected
    assert together["usage"]["total_tokens"] == sum(body["usage"]["total_tokens"] for body in alone)
    ids = [tokenizer.encode(prompt, True) for prompt in prompts]
    assert ask.completion(**fields, prompt=ids)["choices"] == together["choices"]
    events = ask.completion(**fields, prompt=prompts, stream=True, echo=True)
    for index, text in enumerate(expected):
        assert text_of(events, index) == prompts[index // 2] + text


def test_chat_says_what_the_engine_gives(ask: Asker, engine: Engine, tokenizer: Tokenizer) -> None:
    fields = {"max_tokens": 12, "temperature": 0.8, "seed": 2, "n": 2, "logprobs": True, "top_logprobs": 3}
    body = ask.chat(**fields)
    decode = {"max_new_tokens": 12, "temperature": 0.8, "seed": 2, "n": 2, "logprobs": 3}
    output = generate(engine, tokenizer.encode(PROMPT, True), **decode)
    for choice, completion in zip(body["choices"], output.completions, strict=True):
        assert choice["message"] == {"role": "assistant", "content": completion.text, "refusal": None}
        for entry, step, id in zip(
            choice["logprobs"]["content"], completion.logprobs or [], completion.token_ids, strict=True
        ):
            assert entry["logprob"] == step.logprobs[id]
            content = tokenizer.token_bytes(id)
            assert bytes(entry["bytes"]) == (entry["token"].encode() if content is None else content)
            best = sorted(step.ranks, key=step.ranks.__getitem__)[:3]
            assert [top["logprob"] for top in entry["top_logprobs"]] == [step.logprobs[id] for id in best]
    events = ask.chat(**fields, stream=True)
    for index, choice in enumerate(body["choices"]):
        mine = [c for event in events for c in event.data["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


def test_usage_on_the_way_grows(ask: Asker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = ask.completion(max_tokens=30, temperature=0, stream=True, stream_options=options)
    counts = [event.data["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == events[-1].data["usage"]["total_tokens"] - events[-1].data["usage"]["prompt_tokens"]


def test_beams_are_answered_whole(ask: Asker, engine: Engine, tokenizer: Tokenizer) -> None:
    body = ask.completion(max_tokens=10, use_beam_search=True, n=3, length_penalty=0.5)
    decode = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.5}
    output = generate(engine, tokenizer.encode(PROMPT, True), max_new_tokens=10, **decode)
    assert [choice["text"] for choice in body["choices"]] == [completion.text for completion in output.completions]


def test_prompt_log_probabilities_have_vllms_shape(ask: Asker, engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT, True)
    output = generate(engine, prompt, max_new_tokens=1, temperature=0.0, prompt_logprobs=2)
    expected = [
        {id: (value, step.ranks[id]) for id, value in step.logprobs.items()} for step in output.prompt_logprobs or []
    ]
    for body in (ask.chat(max_tokens=1, prompt_logprobs=2), ask.completion(prompt_logprobs=2)["choices"][0]):
        told = body["prompt_logprobs"]
        assert told[0] is None
        assert [{int(id): (e["logprob"], e["rank"]) for id, e in entries.items()} for entries in told[1:]] == expected


@each(
    ("fields", "param", "message"),
    [
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "stop token id 1000000 is not in the vocabulary"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "allowed token id 1000000 is not in the vocabulary"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias", "logit_bias token id 1000000 is not in the vocabulary"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "min_tokens=4 is not allowed: give at most max_tokens=3"),
        ({"max_tokens": 10**6}, "prompt", "together more than the model's"),
        ({"prompt": [5] * 100_000}, "prompt", "shorten it"),
    ],
)
def test_refusals_of_the_engine_use_the_names_of_the_api(
    ask: Asker, fields: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        ask.completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in caught.value.message
    if "prompt" in str(param):
        assert caught.value.code == "context_length_exceeded"


@each("kind", ["completion", "chat"])
def test_a_dropped_stream_continues_where_it_was(ask: Asker, kind: str) -> None:
    fields = {"max_tokens": 16, "temperature": 1.0, "n": 2, "stream": True, "return_token_ids": True}
    if kind == "chat":
        fields |= {"logprobs": True}
    first = getattr(ask, kind)(**fields, last_event_id="")

    def said(events: list[Any], index: int) -> tuple[str, list[int], list[float]]:
        mine = [c for event in events for c in event.data["choices"] if c["index"] == index]
        text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in mine)
        logprobs = [e["logprob"] for c in mine if kind == "chat" and c["logprobs"] for e in c["logprobs"]["content"]]
        return text, [id for c in mine for id in c.get("token_ids", [])], logprobs

    for cut in range(len(first)):
        rest = getattr(ask, kind)(**fields, last_event_id=first[cut].id)
        for index in range(2):
            before, after, complete = (said(events, index) for events in (first[: cut + 1], rest, first))
            assert tuple(a + b for a, b in zip(before, after, strict=True)) == complete
        assert rest[-1].id == first[-1].id


def test_a_place_of_another_stream_is_refused(ask: Asker) -> None:
    fields = {"max_tokens": 4, "stream": True, "temperature": 0}
    place = ask.completion(**fields, last_event_id="")[0].id
    fingerprint = place.split(".")[0]
    for wrong, status, message in (
        ("x", 400, "is not an event id"),
        ("1" * 5000, 400, "is not an event id"),
        (f"fp.{2**64}.0:0", 400, "is not an event id"),
        (place.replace(fingerprint, "other"), 412, "the stream came from other"),
        (f"{place}-1:1", 400, "of another request"),
    ):
        with pytest.raises(ApiError, match=message) as caught:
            ask.completion(**fields, last_event_id=wrong)
        assert caught.value.status == status
    with pytest.raises(ApiError, match="of another request"):
        ask.completion(**fields, seed=1 + int(place.split(".")[1]), last_event_id=place)
    assert all(event.id is None for event in ask.completion(**fields))
