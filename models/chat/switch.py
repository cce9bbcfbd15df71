"""Find the argument of a template that switches reasoning."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from models.chat.description import Span
from models.chat.needles import Renderings, user

FLAGS = ("enable_thinking", "thinking", "reasoning", "add_thoughts")
LEVELS = ("reasoning_effort", "reasoning_strength")
BUDGETS = ("thinking_budget",)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
UNKNOWN = "zzq"
"""A level that no template knows."""


@dataclass(frozen=True)
class Switch:
    """The argument of a template that switches reasoning."""

    name: str
    off: Any = None
    """The value that switches reasoning off; None if there is none."""
    on: Any = None
    """The value that switches it on; None: the argument is left out."""
    levels: tuple[str, ...] = ()
    """Values that set an effort."""
    takes_budget: bool = False
    """Whether the value is a number of tokens."""


def find_switch(renderings: Renderings, names: Collection[str], reasoning: Span | None) -> Switch | None:
    """Return the switch that changes the prompt of a template; None if there is none.

    `names`: the variables that the template reads.
    """
    for name in FLAGS:
        if name in names:
            off, on = (_prompt(renderings, name, value) for value in (False, True))
            if off != on and off is not None and on is not None:
                return Switch(name, off=False, on=True)
    for name in LEVELS:
        if name in names and (switch := _levels(renderings, name)):
            return switch
    for name in BUDGETS:
        if name in names and _prompt(renderings, name, 0) not in (None, _prompt(renderings, name, 512)):
            return Switch(name, off=0, takes_budget=True)
    return None


def _levels(renderings: Renderings, name: str) -> Switch | None:
    """Return a switch with levels. Levels without an effect of their own are left out."""
    default = renderings.text([user()], prompts=True)
    unknown = _prompt(renderings, name, UNKNOWN)
    texts = {level: _prompt(renderings, name, level) for level in EFFORTS}
    taken = {level: text for level, text in texts.items() if text is not None}
    if unknown is not None:
        is_printed = unknown != default and UNKNOWN in unknown
        plain = {level: text.replace(level, UNKNOWN) for level, text in taken.items()}
        if is_printed:
            off = "none" if plain.get("none") != unknown else None
        else:
            taken = {level: text for level, text in taken.items() if text not in (unknown, default)}
            off = "none" if "none" in taken else None
    else:
        off = "none" if "none" in taken else None
    levels = tuple(level for level in taken if level != "none")
    return Switch(name, off=off, levels=levels) if levels or off else None


def _prompt(renderings: Renderings, name: str, value: Any) -> str | None:
    return renderings.text([user()], prompts=True, arguments={name: value})
