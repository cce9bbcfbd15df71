"""An engine that repeats a prompt's tokens, one at a time, with the methods of `EngineClient`."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from pipelines.replicas.engine_process.client import Answer, EngineGone, EngineRefused
from pipelines.replicas.engine_process.frames import (
    Beat,
    Delta,
    Done,
    LoadAdapter,
    Logprob,
    Ready,
    Submit,
    SubmitPooled,
)

READY = Ready(
    context_length=64,
    vocab_size=1000,
    fingerprint="fake",
    decode={},
    num_cache_tokens=1024,
)
POOLED = {
    "/classify": {"pooled": "labels", "labels": ["bad", "good"], "activation": "softmax"},
    **dict.fromkeys(("/embeddings", "/pooling", "/rerank", "/score"), {"pooled": "vector"}),
}
"""The fields of Ready that a path needs, by its end."""


def ready_for(path: str) -> dict[str, Any]:
    """Return the fields of Ready of a model that can answer this path."""
    return POOLED.get("/" + path.rpartition("/")[2], {})


BEAT = Beat(0, 0, 0.0, 0, 0, 0, 0.001)


class FakeEngine:
    """The text of token 17 is "t17 ". The engine generates while `speaks` is set, and clears it after `pauses_after`
    tokens."""

    def __init__(self, text: Callable[[int], str] = "t{} ".format, **ready: Any) -> None:
        """`ready`: fields of Ready that differ from the default; the fake engine has the adapters of its service."""
        self.info: Ready | None = msgspec.structs.replace(READY, **ready)
        self.beat: Beat | None = BEAT
        self.num_restarts = 0
        self.submitted: list[Submit | SubmitPooled] = []
        self.cancelled: list[int] = []
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.pauses_after: int | None = None
        self.refusal: EngineRefused | None = None
        self.adapter_refusal: Exception | None = None
        self._text = text
        self._answers: dict[int, tuple[Answer, asyncio.Task[None]]] = {}

    def submit(self, submit: Submit | SubmitPooled, news: asyncio.Event) -> Answer:
        if self.info is None:
            raise EngineGone("the engine is loading its model")
        submit = msgspec.structs.replace(submit, id=len(self.submitted) + 1)
        self.submitted.append(submit)
        answer = Answer(self, submit, news)  # type: ignore[arg-type]
        if self.refusal is not None:
            answer.end(self.refusal)
            return answer
        self._answers[submit.id] = (answer, asyncio.ensure_future(self._speak(answer)))
        return answer

    async def load_adapter(self, adapter: LoadAdapter) -> str:
        """Load an adapter. Its digest is its path. An error of `adapter_refusal` is raised instead."""
        await asyncio.sleep(0)
        if self.adapter_refusal is not None:
            raise self.adapter_refusal
        self._set_adapters({**self.adapters, adapter.name: adapter.path})
        return adapter.path

    async def unload_adapter(self, name: str) -> None:
        self._set_adapters({other: digest for other, digest in self.adapters.items() if other != name})

    @property
    def adapters(self) -> dict[str, str]:
        return self.info.adapters if self.info else {}

    def _set_adapters(self, adapters: dict[str, str]) -> None:
        if self.info is not None:
            self.info = msgspec.structs.replace(self.info, adapters=adapters)

    def forget(self, answer: Answer) -> None:
        self.cancelled.append(answer.submit.id)
        self._answers.pop(answer.submit.id)[1].cancel()

    def say(self, **beat: Any) -> None:
        """Send a beat with these fields."""
        self.beat = msgspec.structs.replace(self.beat or BEAT, **beat)

    def crash(self) -> None:
        """End like a killed process."""
        self.info = None
        for answer, task in self._answers.values():
            task.cancel()
            answer.end(EngineGone("the engine was ended by SIGKILL: send the request again"))
        self._answers.clear()

    async def _speak(self, answer: Answer) -> None:
        submit = answer.submit
        ids = submit.prompt_token_ids
        if isinstance(submit, SubmitPooled):
            vector = [float(len(ids)), float(sum(ids))]
            answer.accept(0)
            answer.end(Done(submit.id, len(ids), 0, 0, 0.0, None, 0.01, vector=vector))
            return
        settings = (self.info.decode if self.info else {}) | submit.decode
        num_samples = max(settings.get("n") or 1, settings.get("num_return_sequences") or 1)
        most = settings.get("max_new_tokens")
        said = ids if most in (None, "auto") else (ids * (most // len(ids) + 1))[:most]
        answer.accept(submit.decode.get("seed", 7))
        wants = submit.decode.get("logprobs") is not None
        for number, token in enumerate(said, 1):
            await self.speaks.wait()
            if self.pauses_after == number:
                self.speaks.clear()
            for sample in range(num_samples):
                reason = "length" if number == len(said) else None
                logprobs = [Logprob(token, -0.5, 1, [(token, -0.5)])] if wants else []
                answer.add(Delta(submit.id, sample, self._text(token), [token], logprobs, reason))
            await asyncio.sleep(0)
        del self._answers[submit.id]
        answer.end(Done(submit.id, len(ids), 0, num_samples * len(said), 0.001, 0.002, 0.01))
