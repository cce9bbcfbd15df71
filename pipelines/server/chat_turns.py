"""Turns of a conversation on the page: reasoning and tool calls fold, and a user answers a call with its result."""

import json
from collections.abc import Iterator
from typing import Any

from conf.errors import UserError, shortened
from models.tokenizers import Message

REASONING, CALL = "Reasoning", "Call of "
"""Beginnings of the titles of folded turns."""


def shown(message: Message, is_complete: bool) -> list[dict[str, Any]]:
    """Return an answer as turns of the page. Reasoning folds where something follows it.

    A call's title has its name, and its id has the call's id.
    """
    turns: list[dict[str, Any]] = []
    content, calls = message.get("content"), message.get("tool_calls") or []
    if reasoning := message.get("reasoning_content"):
        is_done = is_complete or bool(content or calls)
        turns.append(_folded(reasoning, REASONING, None, is_done))
    if content or not (turns or calls):
        turns.append({"role": "assistant", "content": content or ""})
    for number, call in enumerate(calls, 1):
        is_done = is_complete or number < len(calls)
        text = f"```json\n{call['function']['arguments']}\n```"
        turns.append(_folded(text, f"{CALL}{call['function']['name']}", call["id"], is_done))
    return turns


def _folded(content: str, title: str, id: str | None, is_done: bool) -> dict[str, Any]:
    metadata = {"title": title, "status": "done" if is_done else "pending"} | ({"id": id} if id else {})
    return {"role": "assistant", "content": content, "metadata": metadata}


def conversation(history: list[Any], text: str) -> list[Message]:
    """Return the page's turns and the user's next text as messages. A text behind calls is the result of each."""
    messages: list[Message] = []
    for turn in [*history, {"role": "user", "content": text}]:
        content, metadata = _text(turn["content"]), turn.get("metadata") or {}
        title = metadata.get("title") or ""
        if turn["role"] == "user":
            messages += _user_messages(messages, content)
            continue
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        if title == REASONING:
            messages[-1]["reasoning_content"] = content
        elif title.startswith(CALL):
            arguments = content.removeprefix("```json\n").removesuffix("\n```")
            function = {"name": title.removeprefix(CALL), "arguments": arguments}
            call = {"id": str(metadata.get("id")), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages[-1]["content"] = content
    return messages


def _user_messages(messages: list[Message], text: str) -> Iterator[Message]:
    """Yield the results of the last answer's calls, or a message of the user."""
    calls = messages[-1].get("tool_calls") if messages else None
    for call in calls or ():
        yield {"role": "tool", "tool_call_id": call["id"], "content": text}
    if not calls:
        yield {"role": "user", "content": text}


def read_tools(text: str) -> dict[str, Any]:
    """Return the request field `tools` for a JSON list of tools; nothing for an empty text.

    Raises UserError for anything else.
    """
    if not text.strip():
        return {}
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the tools are no JSON: {shortened(str(error))}") from error
    if not isinstance(tools, list):
        raise UserError("the tools are no list: give a JSON list of tools, as in OpenAI's API")
    return {"tools": tools}


def _text(content: Any) -> str:
    """Return the text of a turn, which Gradio passes in parts."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)
