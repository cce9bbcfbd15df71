"""Requests through the engine's process: what predict gives, and what the process does beside it."""

import asyncio
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from pipelines.engine import Engine
from pipelines.loading import load_engine
from pipelines.serve.frames import Submit
from tests.helpers.serving import run_async, serving, tiny_run, whole

GREEDY = {"temperature": 0.0, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(tiny_run(), 4)


def prompt_of(engine: Engine, text: str = "Once upon a time") -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text, True)


def test_a_greedy_prompt_is_answered_as_predict_does(engine: Engine) -> None:
    prompt = prompt_of(engine)

    async def test() -> Any:
        async with serving() as client:
            submits = [Submit(0, prompt, GREEDY), Submit(0, prompt, GREEDY, streams=True)]
            return await asyncio.gather(*(whole(client.submit(each)) for each in submits))

    answers = run_async(test())
    (output,) = engine.generate([engine.request(0, prompt, DecodeConfig(**GREEDY))])
    for answer in answers:
        assert answer.token_ids == [output.completions[0].token_ids]
        assert answer.texts == [output.completions[0].text]
        assert answer.done.num_generated_tokens == len(output.completions[0].token_ids)
    assert answers[0].samples[0].num_deltas == 1
