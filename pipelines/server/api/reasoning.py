"""The reasoning effort of a request, as arguments of a chat template."""

from collections.abc import Iterable
from typing import Any

from models.chat.switch import OFF, Switch, arguments_of_effort


def effort_arguments(switches: Iterable[Switch], effort: str) -> tuple[dict[str, Any], list[str]]:
    """Return the template arguments that express an effort, and warnings about it.

    `switches`: the template's arguments for reasoning. A template with levels gets the nearest one.
    """
    arguments, expressed = arguments_of_effort(switches, effort)
    field = f"reasoning_effort={effort}"
    if expressed is None:
        return arguments, [f"{field} is not used: the chat template has no argument for it"]
    if expressed == "" and effort != OFF:
        return arguments, [f"{field} only turns reasoning on: the chat template has no levels"]
    return arguments, [] if expressed in (effort, "") else [f"{field} becomes {expressed} for the chat template"]
