"""A quantised model, and a model on two ranks, over HTTP: the answers are predict's with the same settings. Real
processes."""

from pathlib import Path

import httpx
import pytest

from pipelines import pipeline
from tests.helpers.cases import each
from tests.helpers.clients import PROMPT
from tests.helpers.server import ended, served
from tests.helpers.waiting import LIMIT_S


@pytest.mark.long
@each("settings", [("quant=int8",), ("parallel=tp", "parallel.tp=2", "device.threads=1")])
def test_answers_are_predicts_with_the_same_settings(settings: tuple[str, ...], tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 5}  # int8 has another text
    overrides = ["decode.max_new_tokens=24", "decode.temperature=0.8", "decode.seed=5"]
    one_process = [setting for setting in settings if not setting.startswith("parallel")]  # ranks have its bits, too
    pipe = pipeline("text_generation", device="cpu", overrides=[*overrides, *one_process])
    (result,) = pipe(PROMPT, return_full_text=False)
    with served(tmp_path / "run", *settings) as (process, url):
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S).json() for _ in range(2)]
        assert [answer["choices"][0]["text"] for answer in answers] == result["text_generation_text"] * 2
        assert ended(process)[0] == 0
