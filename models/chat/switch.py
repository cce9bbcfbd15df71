"""Find the arguments of a template that switch reasoning."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from models.chat.needles import Renderings, user

FLAGS = ("enable_thinking", "thinking", "reasoning", "add_thoughts")
LEVELS = ("reasoning_effort", "reasoning_strength")
BUDGETS = ("thinking_budget",)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
OFF, PRINTED = "none", ("low", "medium", "high")
UNKNOWN = "zzq"
"""A level that no template knows."""


@dataclass(frozen=True)
class Switch:
    """The argument of a template that switches reasoning."""

    name: str
    off: Any = None
    """The value that switches reasoning off; None if there is none."""
    on: Any = None
    """The value that switches it on; None: leave the argument out, or give a level."""
    levels: tuple[str, ...] = ()
    """Values that set an effort."""
    takes_budget: bool = False
    """Whether the value is a number of tokens."""


def find_switches(renderings: Renderings, names: Collection[str]) -> tuple[Switch, ...]:
    """Return the switches that change the prompt of a template.

    `names`: the variables that the template reads.
    """
    flags = [_flag(renderings, name) for name in FLAGS if name in names]
    levels = [_levels(renderings, name) for name in LEVELS if name in names]
    budgets = [_budget(renderings, name) for name in BUDGETS if name in names]
    return tuple(switch for switch in (*flags, *levels, *budgets) if switch)


def arguments_of_effort(switches: Iterable[Switch], effort: str) -> tuple[dict[str, Any], str | None]:
    """Return the template's arguments for an effort of EFFORTS, and the effort that they express.

    That is the effort itself, the nearest level of the template, "" for reasoning without levels, or None if the
    template has no argument for it.
    """
    arguments: dict[str, Any] = {}
    expressed = None
    for switch in switches:
        value = switch.off if effort == OFF else switch.on
        if effort != OFF and switch.levels:
            value = expressed = min(switch.levels, key=lambda level: _distance(level, effort))
        if value is not None:
            arguments[switch.name] = value
            expressed = expressed or (OFF if effort == OFF else "")
    return arguments, expressed


def _distance(level: str, effort: str) -> tuple[int, int]:
    """Return how far two efforts are apart. Of two equally near levels the higher one is nearer."""
    place = EFFORTS.index(level)
    return abs(place - EFFORTS.index(effort)), -place


def _flag(renderings: Renderings, name: str) -> Switch | None:
    off, on = (_prompt(renderings, name, value) for value in (False, True))
    return Switch(name, off=False, on=True) if off != on and off is not None and on is not None else None


def _levels(renderings: Renderings, name: str) -> Switch | None:
    """Return a switch with levels.

    Where the template prints any level, only the usual ones count, and none of them switches reasoning off.
    """
    default, unknown = renderings.text([user()], prompts=True, tools=None), _prompt(renderings, name, UNKNOWN)
    texts = {level: _prompt(renderings, name, level) for level in EFFORTS}
    taken = {level: text for level, text in texts.items() if text is not None}
    if unknown is not None and UNKNOWN in unknown:
        printed = {level for level, text in taken.items() if text == unknown.replace(UNKNOWN, level)}
        taken = {level: text for level, text in taken.items() if level in PRINTED or level not in printed}
    elif unknown is not None:
        taken = {level: text for level, text in taken.items() if text not in (unknown, default)}
    levels = tuple(level for level in taken if level != OFF)
    return Switch(name, off=OFF if OFF in taken else None, levels=levels) if taken else None


def _budget(renderings: Renderings, name: str) -> Switch | None:
    off, some = (_prompt(renderings, name, value) for value in (0, 512))
    return Switch(name, off=0, takes_budget=True) if off != some and off is not None and some is not None else None


def _prompt(renderings: Renderings, name: str, value: Any) -> str | None:
    return renderings.text([user()], prompts=True, arguments={name: value}, tools=None)
