"""Answers of /v1/embeddings."""

import base64
import struct
from typing import Any

from models.tokenizers.base import Tokenizer
from pipelines.api.errors import bad_request
from pipelines.api.requests import EmbeddingRequest
from pipelines.serve.client import EngineRefused
from pipelines.serve.frames import Ready, SubmitPooled
from pipelines.serve.submitted import Call, Submitted


def encode_input(ready: Ready, tokenizer: Tokenizer | None, text: str) -> list[int]:
    """Return the token ids of a text, as `task=embed` makes them. Raises ApiError where there is no tokenizer."""
    if tokenizer is None:
        raise bad_request("the server has no tokenizer: give token ids as input", "input")
    token_ids = tokenizer.encode(ready.instruction + text, True)
    if ready.final_token_id is None or token_ids[-1:] == [ready.final_token_id]:
        return token_ids
    return [*token_ids, ready.final_token_id]


class EmbeddingAnswer:
    """The vectors of one or several prompts."""

    def __init__(self, call: Call, request: EmbeddingRequest, prompts: list[list[int]]) -> None:
        """prompts: token ids of each input. Raises ApiError for a model without vectors, and where there is no engine."""
        ready = call.engine.info
        if not ready.embeds:
            raise bad_request(
                "this model continues texts and gives no vectors of them: ask an embedding model", "model"
            )
        self._call = call
        self._request = request
        self._fingerprint = ready.fingerprint
        self._num_tokens = sum(map(len, prompts))
        self._submitted = Submitted(call.engine, [SubmitPooled(0, prompt) for prompt in prompts])

    async def accepted(self) -> None:
        """Wait until the engine has taken the request. Raises ApiError for what it refuses."""
        try:
            await self._submitted.accepted()
        except EngineRefused as error:
            code = "context_length_exceeded" if "shorten it" in error.message else None
            raise bad_request(error.message, "input", code) from error

    def cancel(self) -> None:
        """Leave the request. Does nothing behind the end."""
        self._submitted.cancel()

    async def body(self) -> dict[str, Any]:
        """Return the answer. Raises ApiError where the engine fails."""
        async for _ in self._submitted.deltas():
            pass
        vectors = [done.vector or [] for _, done in sorted(self._submitted.dones.items())]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._written(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": self._call.model,
            "system_fingerprint": self._fingerprint,
            "usage": {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens},
        }

    def _written(self, vector: list[float]) -> list[float] | str:
        """Return a vector as the request wants it: numbers, or base64 of little-endian float32."""
        if self._request.encoding_format != "base64":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
