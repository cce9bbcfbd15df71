"""The reasoning effort of a request, as arguments of a chat template."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar, get_args

from conf.errors import UserError
from pipelines.server.api.requests import Effort

LEVELS: tuple[str, ...] = get_args(Effort)
"""All efforts, from the least to the most."""
SWITCHES = ("enable_thinking", "thinking")
"""Template arguments that turn reasoning on and off."""

T = TypeVar("T")


def with_effort(
    encode: Callable[[dict[str, Any]], T], effort: str | None, names: Collection[str]
) -> tuple[T, list[str]]:
    """Return `encode(arguments)` with the template arguments that express an effort, and warnings about it.

    `names`: the template's arguments. Some templates reject efforts: then the nearest accepted effort is used.

    Raises UserError if `encode` raises it also without the effort.
    """
    if effort is None:
        return encode({}), []
    field = f"reasoning_effort={effort}"
    switches = {name: effort != "none" for name in SWITCHES if name in names}
    if "reasoning_effort" not in names:
        if not switches:
            return encode({}), [f"{field} is not used: the chat template has no argument for it"]
        only = [] if effort == "none" else [f"{field} only turns reasoning on: the chat template has no levels"]
        return encode(switches), only
    try:
        return encode({**switches, "reasoning_effort": effort}), []
    except UserError:
        without = encode(switches)  # raises the error if the effort does not cause it
    for level in _nearest(effort):
        try:
            return encode({**switches, "reasoning_effort": level}), [f"{field} becomes {level} for the chat template"]
        except UserError:
            continue
    return without, [f"{field} is not used: the chat template rejects it"]


def _nearest(effort: str) -> list[str]:
    """Return the other efforts that keep reasoning on or off, the nearest first and the higher first of two."""
    place = LEVELS.index(effort)
    others = [level for level in LEVELS if level != effort and (level == "none") == (effort == "none")]
    return sorted(others, key=lambda level: (abs(LEVELS.index(level) - place), -LEVELS.index(level)))
