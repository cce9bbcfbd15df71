"""Lines of OpenAI's batches: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from conf.errors import UserError, shortened
from pipelines.server.api.errors import ApiError, bad_request
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import ChatRequest, CompletionRequest
from pipelines.server.api.settings import decode_settings

BatchRequest: TypeAlias = ChatRequest | CompletionRequest
REQUESTS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    kind.path: kind for kind in (ChatRequest, CompletionRequest)
}
ONE_BY_ONE = {  # body fields that rows do not support
    "stream": "rows are written whole: leave it out",
    "echo": "give prompt_logprobs, or leave it out",
    "tools": "task=serve calls tools: leave it out",
    "chat_template_kwargs": "task=serve has these: leave it out",
    "reasoning_effort": "task=serve has this: leave it out",
    "return_token_ids": "rows have token_ids always: leave it out",
    "add_special_tokens": "give predict.add_special_tokens",
}
RUNS_OWN = {"max_new_tokens": "the run's"}
"""The default length of an answer is the run's setting."""


class RefusedLine(UserError):
    """A line that cannot be run. `error`: the server's error for this line."""

    def __init__(self, error: ApiError, message: str) -> None:
        super().__init__(message)
        self.error = error


@contextmanager
def line_errors() -> Iterator[None]:
    """Convert ApiError and UserError to RefusedLine within the block."""
    try:
        yield
    except RefusedLine:
        raise
    except ApiError as error:
        raise RefusedLine(error, error.message) from error
    except UserError as error:
        raise RefusedLine(bad_request(str(error), None), str(error)) from error


def row_of(values: dict[str, Any]) -> tuple[dict[str, Any], BatchRequest]:
    """Return a line as the fields of a row, and its checked body.

    The fields are id, decode, and messages, prompt or prompt_token_ids.

    Raises UserError for a line of another form, and RefusedLine for a body that rows do not support.
    """
    if unknown := sorted(set(values) - {"custom_id", "method", "url", "body"}):
        raise UserError(f"a batch's line has custom_id, method, url and body, not {shortened(', '.join(unknown))}")
    url = values.get("url")
    kind = REQUESTS.get(url) if isinstance(url, str) else None
    if kind is None or values.get("method") != "POST":
        route = shortened(f"{values.get('method')} {url}")
        raise UserError(f"a batch's line has {route}, which is not supported: give POST {' and POST '.join(REQUESTS)}")
    try:
        request = check_request(kind, values["body"])
        settings = decode_settings(request, RUNS_OWN)
        for name, remedy in ONE_BY_ONE.items():
            if getattr(request, name, None):
                raise bad_request(f"{name} is not used by rows: {remedy}", name)
        return {"id": values["custom_id"], "decode": settings, **_prompt(request)}, request
    except ApiError as error:
        raise RefusedLine(error, f"body: {error.message}") from error


def _prompt(request: BatchRequest) -> dict[str, Any]:
    if isinstance(request, ChatRequest):
        return {"messages": request.conversation()}
    if len(request.prompts) > 1:
        message = f"{len(request.prompts)} prompts are in one line: give each prompt its own line"
        raise bad_request(message, "prompt")
    (prompt,) = request.prompts
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
