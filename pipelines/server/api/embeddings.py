"""Requests, prompts and answers of /v1/embeddings."""

import base64
import struct
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from models.tokenizers.base import Tokenizer
from models.tokenizers.truncation import truncated
from pipelines.replicas.engine_process.frames import Ready
from pipelines.server.api.errors import ApiError, bad_request, too_long
from pipelines.server.api.requests import Body, Name, Prompt, PromptIds, listed_prompts

MAX_INPUTS = 2048  # per request, as in OpenAI's API
IN_ENGINE = 64  # maximum inputs of one request in the engine at a time, so that other requests proceed
Inputs: TypeAlias = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    | PromptIds
    | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
)


class EmbeddingRequest(Body):
    """Texts to embed."""

    path = "/v1/embeddings"

    model: Name
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @property
    def inputs(self) -> list[Prompt]:
        """Return the inputs. Each is a text or token ids."""
        return listed_prompts(self.input)


def encode_input(model: Ready, tokenizer: Tokenizer | None, text: str) -> list[int]:
    """Return the token ids of a text, equal to the token ids of `task=embed`.

    Raises ApiError if the server has no tokenizer, and, before encoding, if the text must have too many tokens.
    """
    if tokenizer is None:
        raise bad_request("the server has no tokenizer: give token ids as input", "input")
    text, most, end = model.instruction + text, model.max_text_tokens, []
    if most is None and (least := tokenizer.least_tokens(text)) > model.context_length:
        raise too_long(f"at least {least}", model.context_length, "input")
    token_ids = tokenizer.encode(text, True)
    if model.final_token_id is not None and token_ids[-1:] != [model.final_token_id]:
        end = [model.final_token_id]
    return [*truncated(tokenizer, text, token_ids, most and most - len(end))[0], *end]


def embedding_refusal(message: str) -> ApiError:
    """Return the API error for an engine error message."""
    return bad_request(message, "input", "context_length_exceeded" if "shorten it" in message else None)


def embedding_body(
    request: EmbeddingRequest, model: str, fingerprint: str | None, vectors: list[list[float]], num_tokens: int
) -> dict[str, Any]:
    """Return the answer. Vectors are lists of numbers, or base64 of little-endian float32, as the request says."""

    def written(vector: list[float]) -> list[float] | str:
        if request.encoding_format != "base64":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": written(vector)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "system_fingerprint": fingerprint,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
