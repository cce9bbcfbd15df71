"""The same body, seed and fingerprint give the same answer over HTTP: alone, from the cache, and among 64 other
requests, some of which restart."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from conf.decoding import DecodeConfig
from pipelines.loading.load_engine import load_engine
from tests.helpers.server import served
from tests.helpers.serving import tiny_run

PROMPT = "Once upon a time there was a little girl named Lily. She loved to play outside in the park."
BLOCK_BYTES = 4 * 2 * 4 * 2 * 64 * 2  # 4 tokens, keys and values of 4 layers of 2 heads of 64 in bfloat16
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": 60,
    "temperature": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 11,
}
BODIES: list[dict[str, Any]] = [
    {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 1, "seed": 7, "logprobs": 2},
    CHAT,
    {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0.8, "seed": 2**62, "n": 2},
]


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}{{")]
    return float(line.split()[-1])


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def told(answer: dict[str, Any]) -> Any:
    """The parts of an answer that do not depend on the time of the request."""
    return {name: answer[name] for name in ("choices", "seed", "system_fingerprint", "model")}


@pytest.mark.long
def test_cached_and_preempted_answers_are_the_same_bytes(tmp_path: Path) -> None:
    small = (
        "device.block_size=4",
        f"device.kv_cache_memory={70 * BLOCK_BYTES}",
        "serve.batch_size=8",
        "serve.max_waiting=99",
    )

    async def test(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            first = [await ask(client, body) for body in BODIES]
            cached = [await ask(client, body) for body in BODIES]
            assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for answer in cached)
            assert metric(url, "vllm:num_preemptions_total") == 0
            others = [{**BODIES[0], "prompt": f"{i} {PROMPT}", "seed": i, "max_tokens": 20} for i in range(64)]
            crowd = await asyncio.gather(*(ask(client, body) for body in BODIES * 2 + others))
            assert metric(url, "vllm:num_preemptions_total") > 0
            expected = list(map(told, first))
            assert list(map(told, cached)) == expected
            assert list(map(told, crowd[:6])) == expected * 2
            assert [answer["usage"]["completion_tokens"] for answer in first] == [60, 60, 80]

    with served(tmp_path / "run", *small, "decode.ignore_eos=true") as (_, url):
        asyncio.run(test(url))
        text = httpx.post(f"{url}/v1/completions", json=BODIES[0], timeout=120).json()["choices"][0]["text"]
    engine = load_engine(tiny_run(), 4)  # which has capacity
    assert engine.tokenizer is not None
    decode = DecodeConfig(max_new_tokens=60, temperature=1.0, seed=7, ignore_eos=True)
    (output,) = engine.generate([engine.request(0, engine.tokenizer.encode(PROMPT, True), decode)])
    assert text == output.completions[0].text
