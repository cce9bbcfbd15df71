"""Places of system messages that a chat template does not take.

Agents send several system messages, also in the middle of a conversation. Of 127 real templates
20 reject a second system message at the beginning, and 13 omit it. 38 reject a system message in the middle, and 13 omit
it.
"""

from collections.abc import Callable
from functools import cached_property

from conf.errors import UserError
from models.tokenizers.base import Message

NEEDLE = "quintetneedle"
_SYSTEM, _USER = {"role": "system", "content": NEEDLE}, {"role": "user", "content": "hi"}
WARNING = "system messages are joined, or given as the user's: the chat template has no place for them"


class SystemTurns:
    """Moves the system messages of a conversation to places that the template takes."""

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        """`render`: returns a conversation as text. Raises UserError for messages that the template does not take."""
        self._render = render

    def fitted(self, messages: list[Message]) -> tuple[list[Message], list[str]]:
        """Return the messages with the same texts in the same order, and a warning if any was moved."""
        num_first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        first, later = messages[:num_first], messages[num_first:]
        if num_first > 1 and not self._takes_two:
            first = [first[0] | {"content": "\n\n".join(message["content"] for message in first)}]
        takes_first = not first or self._takes_one
        takes_later = not any(message["role"] == "system" for message in later) or self._takes_later
        if len(first) == num_first and takes_first and takes_later:
            return messages, []
        fitted: list[Message] = []
        was_moved = False
        for place, message in enumerate(first + later):
            is_moved = message["role"] == "system" and not (takes_first if place < len(first) else takes_later)
            turn = message | {"role": "user"} if is_moved else message
            # A moved message joins adjacent user messages, because some templates need turns.
            if fitted and (is_moved or was_moved) and fitted[-1]["role"] == turn["role"] == "user":
                fitted[-1] = fitted[-1] | {"content": f"{fitted[-1]['content']}\n\n{turn['content']}"}
            else:
                fitted.append(turn)
            was_moved = is_moved
        return fitted, [WARNING]

    @cached_property
    def _takes_one(self) -> bool:
        return self._writes([_SYSTEM, _USER])

    @cached_property
    def _takes_two(self) -> bool:
        return self._writes([_SYSTEM, _SYSTEM, _USER])

    @cached_property
    def _takes_later(self) -> bool:
        answer = {"role": "assistant", "content": "yes"}
        return self._writes([_SYSTEM, _USER, answer, _SYSTEM, _USER])

    def _writes(self, messages: list[Message]) -> bool:
        try:
            return self._render(messages).count(NEEDLE) >= messages.count(_SYSTEM)
        except UserError:
            return False
