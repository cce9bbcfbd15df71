"""Conversations that end inside their last message, so that the answer continues its text.

The text equals transformers' apply_chat_template with continue_final_message=True.
"""

from typing import Any

from conf.errors import UserError

TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # its space shows whether the template keeps the space at the end of a message


def tagged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a tag at the end of the last text. Raises UserError if the last message has no text."""
    last = messages[-1] if messages else {}
    if not isinstance(last.get("content"), str):
        raise UserError("the last message has no content to continue: give one, or leave out continue_final_message")
    return [*messages[:-1], last | {"content": last["content"] + TAG}]


def cut_at_tag(text: str, messages: list[dict[str, Any]]) -> str:
    """Return a rendered conversation up to the tag. `messages`: without the tag.

    Raises UserError if the template omits or changes the last message.
    """
    place = text.rfind(TAG.rstrip())
    if place < 0 or messages[-1]["content"].strip() not in text:
        problem = "the chat template changes the last message, so that no answer can continue it"
        raise UserError(f"{problem}: leave out continue_final_message")
    return text[:place] if text.startswith(TAG, place) else text[:place].rstrip()
