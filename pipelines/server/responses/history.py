"""Conversations of stored responses: the items before a request's input, and the items stored with a response."""

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from conf.errors import shortened
from pipelines.server.api.errors import ApiError, bad_request
from pipelines.server.api.response_requests import MAX_ITEMS, CountInputRequest, InputItem, InputMessage, Item
from pipelines.server.responses.store import ResponseStore

R = TypeVar("R", bound=CountInputRequest)

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
FIELD = "previous_response_id"
COMPLETE = ("completed", "incomplete")


async def with_history(body: R, store: ResponseStore | None, owner: str | None) -> R:
    """Return a request with the conversation of `previous_response_id` before its input. Raises ApiError (400, 503).

    `owner`: name of the API key.
    """
    if body.previous_response_id is None:
        return body
    if store is None:
        message = f"{FIELD} is not supported: nothing is kept between requests without serve.response_store"
        raise _not_found(f"{message}: send the whole conversation")
    given = f"{FIELD}={shortened(body.previous_response_id)}"
    stored = await store.find(owner, body.previous_response_id)
    if stored is None:
        raise _not_found(f"{given} is not found: send the whole conversation")
    if (status := stored.response["status"]) not in COMPLETE:
        raise bad_request(f"{given} is {status}: give a response that is {' or '.join(COMPLETE)}", FIELD)
    if stored.size > store.max_conversation:
        limit = f"serve.max_body allows {store.max_conversation}"
        message = f"the conversation of {given} has {stored.size} bytes, and {limit}"
        raise bad_request(f"{message}: begin a new conversation", FIELD)
    try:
        items = ITEMS.validate_python([*stored.items, *stored.response["output"]])
    except ValidationError as error:
        raise _not_found(f"{given} cannot be read: send the whole conversation") from error
    whole = body.after(items)
    if (count := len(whole.items)) > MAX_ITEMS:
        message = f"the conversation of {given} has {count} items with this input, and {MAX_ITEMS} are allowed"
        raise bad_request(f"{message}: begin a new conversation", FIELD)
    return whole


def input_items(items: Sequence[Item], response_id: str) -> list[dict[str, Any]]:
    """Return items as the route input_items lists them: with distinct ids, a status, and texts as parts."""
    listed, ids = [], set[str]()
    for index, item in enumerate(items):
        fields = item.model_dump(exclude_unset=True) | {"type": item.type}
        if isinstance(item, InputMessage) and isinstance(item.content, str):
            fields["content"] = [_text_part(item.role, item.content)]
        if isinstance(item, InputItem):
            fields["status"] = item.status or "completed"
        if not isinstance(fields.get("id"), str) or fields["id"] in ids:
            fields["id"] = f"item_{response_id.removeprefix('resp_')}_{index}"
        ids.add(fields["id"])
        listed.append(fields)
    return listed


def _text_part(role: str, text: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _not_found(message: str) -> ApiError:
    return bad_request(message, FIELD, "previous_response_not_found")
