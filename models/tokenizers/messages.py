"""Check the messages of a conversation, which come from files and callers."""

from typing import Any

from conf.errors import UserError, shortened

TEXTS = ("name", "tool_call_id", "reasoning_content")  # other text fields that templates read


def check_messages(messages: list[Any]) -> None:
    """Raise UserError unless the messages have the form of OpenAI's API, with only texts as content."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError('messages must be objects with a text "role" and a text "content"')
        calls = message.get("tool_calls")
        if calls is not None:
            _check_calls(message["role"], calls)
        if not isinstance(message.get("content"), str) and not (calls and message.get("content") is None):
            raise UserError(
                'messages must be objects with a text "role" and a text "content", or an answer\'s "tool_calls"'
            )
        for name in TEXTS:
            if not isinstance(message.get(name), str | None):
                raise UserError(f"{name} of a message is {shortened(repr(message[name]))}, not a text")
    if not messages:
        raise UserError("messages is empty: give at least one")


def _check_calls(role: str, calls: object) -> None:
    if role != "assistant":
        raise UserError(f"a message of role {shortened(role)!r} has tool_calls, which only the role assistant can have")
    if not isinstance(calls, list):
        raise UserError(f"tool_calls is {shortened(repr(calls))}, not a list")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), dict | str)
        ):
            form = '{"function": {"name": TEXT, "arguments": OBJECT}}'
            raise UserError(f"tool_calls has {shortened(repr(call))}: a call is {form}")
