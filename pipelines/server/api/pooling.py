"""Requests and answers of /v1/embeddings in the format of OpenAI's API, /classify and /pooling in vLLM's."""

import base64
import struct
import time
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipelines.replicas.engine_process.frames import Activation, Ready
from pipelines.server.api.errors import ApiError, bad_request
from pipelines.server.api.generation import RequestContext
from pipelines.server.api.pooled_prompts import MAX_INPUTS, PooledBody
from pipelines.server.api.requests import Json, Message, Name, Prompt, PromptIds, listed_prompts

IN_ENGINE = 64  # maximum inputs of one request in the engine at a time, so that other requests proceed
Inputs: TypeAlias = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    | PromptIds
    | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
)


class EmbeddingRequest(PooledBody):
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

    @property
    def num_prompts(self) -> int:
        return len(self.inputs)


def embedding_refusal(message: str, param: str) -> ApiError:
    """Return the API error for an engine error message. `param`: the field to blame."""
    return bad_request(message, param, "context_length_exceeded" if "shorten it" in message else None)


def embedding_body(
    request: EmbeddingRequest, model: str, fingerprint: str | None, vectors: list[list[float]], num_tokens: int
) -> dict[str, Any]:
    """Return the answer. Vectors are lists of numbers, or base64 of little-endian float32, as the request says."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": written(vector, request.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "system_fingerprint": fingerprint,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def written(vector: list[float], encoding_format: str | None) -> list[float] | str:
    """Return the numbers, or base64 of little-endian float32."""
    if encoding_format != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class PooledInputs(PooledBody):
    """Base of the requests with texts, token ids or a conversation."""

    input: Inputs | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    """A conversation, instead of `input`."""
    chat_template_kwargs: Annotated[Json, Field(max_length=32)] | None = None
    use_activation: bool | None = None
    """Whether the outputs of labels become probabilities."""

    @property
    def inputs(self) -> list[Prompt]:
        """The texts and token ids; empty for a conversation. Raises ApiError unless the body has one of both."""
        if (self.input is None) == (self.messages is None):
            raise bad_request("give either input or messages", "input")
        if self.chat_template_kwargs and self.messages is None:
            raise bad_request("chat_template_kwargs goes with messages: leave it out", "chat_template_kwargs")
        return [] if self.input is None else listed_prompts(self.input)

    @property
    def num_prompts(self) -> int:
        return 1 if self.messages is not None else len(self.inputs)


class ClassifyRequest(PooledInputs):
    """Texts to classify. By default the outputs of labels become probabilities."""

    path = "/classify"


class PoolingRequest(PooledInputs):
    """Texts whose vectors or label outputs are returned. By default label outputs are returned unchanged."""

    path = "/pooling"

    encoding_format: Literal["float", "base64"] | None = None


def probabilities(outputs: list[float], activation: Activation) -> list[float]:
    """Return the probability of each label [O] by softmax or sigmoid, in float64; with "none" the outputs."""
    values: NDArray[np.float64] = np.asarray(outputs, np.float64)
    if activation == "none":
        return outputs
    if activation == "sigmoid":
        return [float(p) for p in np.exp(-np.logaddexp(0, -values))]
    exponentials = np.exp(values - values.max())
    return [float(p) for p in exponentials / exponentials.sum()]


def classify_body(context: RequestContext, model: Ready, probs: list[list[float]], num_tokens: int) -> dict[str, Any]:
    """Return the answer. A label is the name of the highest number."""
    data = [
        {"index": i, "label": model.labels[int(np.argmax(row))], "probs": row, "num_classes": len(row)}
        for i, row in enumerate(probs)
    ]
    return list_body(context, data, num_tokens)


def pooling_body(
    request: PoolingRequest, context: RequestContext, vectors: list[list[float]], num_tokens: int
) -> dict[str, Any]:
    """Return the answer."""
    data = [
        {"object": "pooling", "index": i, "data": written(vector, request.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    return list_body(context, data, num_tokens)


def list_body(context: RequestContext, data: list[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    """Return the list of vLLM's API. `num_tokens`: of all prompts."""
    return {
        "id": context.id,
        "object": "list",
        "created": int(time.time()),
        "model": context.model,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
