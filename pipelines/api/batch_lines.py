"""The lines of OpenAI's batches: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}."""

from typing import Any

from conf.errors import UserError, shortened
from pipelines.api.errors import ApiError
from pipelines.api.requests import ChatRequest, CompletionRequest, check_request
from pipelines.api.settings import decode_settings

REQUESTS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    kind.path: kind for kind in (ChatRequest, CompletionRequest)
}
ONE_BY_ONE = {  # fields of a body that a row has no place for
    "stream": "rows are written whole: leave it out",
    "echo": "give prompt_logprobs, or leave it out",
    "tools": "task=serve calls tools: leave it out",
    "chat_template_kwargs": "task=serve has these: leave it out",
    "reasoning_effort": "task=serve has this: leave it out",
    "return_token_ids": "rows have token_ids always: leave it out",
    "add_special_tokens": "give predict.add_special_tokens",
}
RUNS_OWN = {"max_new_tokens": "the run's"}
"""What holds where a body gives no length: the run's setting."""


def row_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return a line as the fields of a row: id, messages, prompt or prompt_token_ids, decode. Raises UserError for what a row cannot be."""
    if unknown := sorted(set(values) - {"custom_id", "method", "url", "body"}):
        raise UserError(f"a batch's line has custom_id, method, url and body, not {shortened(', '.join(unknown))}")
    url = values.get("url")
    kind = REQUESTS.get(url) if isinstance(url, str) else None
    if kind is None or values.get("method") != "POST":
        given = shortened(f"{values.get('method')} {url}")
        raise UserError(f"a batch's line asks for {given}: there are POST {' and POST '.join(REQUESTS)}")
    try:
        request = check_request(kind, values["body"])
        settings = decode_settings(request, RUNS_OWN)
    except ApiError as error:
        raise UserError(f"body: {error.message}") from error
    for name, remedy in ONE_BY_ONE.items():
        if getattr(request, name, None):
            raise UserError(f"body: {name} is not used by rows: {remedy}")
    return {"id": values["custom_id"], "decode": settings, **_prompt(request)}


def _prompt(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    if isinstance(request, ChatRequest):
        return {"messages": request.conversation()}
    if len(request.prompts) > 1:
        raise UserError(f"body: {len(request.prompts)} prompts are several rows: give each a line of its own")
    (prompt,) = request.prompts
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
