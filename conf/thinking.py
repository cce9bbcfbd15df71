"""Settings of reasoning: a part of the decode group. Imports only the standard library."""

from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from conf.constraints import check_fields, is_set, option
from conf.errors import ErrorCode, UserError, check, list_known_names, shortened

MAX_CHARACTERS = 4096  # of a marker, or of the closing text
_WITH_LIMIT = {"max_tokens": is_set(give="256")}


def _is_short(text: str) -> bool:
    return len(text) <= MAX_CHARACTERS and text == text.encode("utf-8", "ignore").decode()


_TEXT = f"of at most {MAX_CHARACTERS} characters, without half a surrogate pair"


@dataclass
class ThinkingConfig:
    """A limit on the tokens of reasoning. The engine counts them between two markers, and writes `closing` at the limit."""

    max_tokens: int | None = option(None, minimum=0, maximum=2**31 - 1)
    """Most tokens of reasoning in an answer; null: no limit. Up to 3 more tokens complete a character."""
    start: str = option("<think>", form=(_is_short, f"a text {_TEXT}"), only_with=_WITH_LIMIT)
    """Text after which reasoning begins; empty: only at the beginning of the answer."""
    end: str = option(
        "</think>",
        form=(lambda text: text and _is_short(text), f"a text that is not empty, {_TEXT}"),
        only_with=_WITH_LIMIT,
    )
    """Text at which reasoning ends."""
    closing: str | None = option(None, form=(_is_short, f"null or a text {_TEXT}"), only_with=_WITH_LIMIT)
    """Text that the engine writes at the limit. It contains `end`. null: a line break and `end`."""
    is_open: bool | None = option(None, only_with=_WITH_LIMIT)
    """Whether the prompt ends inside reasoning. null: whether the prompt ends with `start`, apart from white space."""

    def __post_init__(self) -> None:
        check_fields(self, "decode.thinking")
        allowed = f"a text that contains decode.thinking.end={self.end}"
        check(self.end in self.closing_text, "decode.thinking.closing", self.closing, allowed, ErrorCode.malformed)

    @property
    def closing_text(self) -> str:
        return f"\n{self.end}" if self.closing is None else self.closing


def thinking_of(known: ThinkingConfig, value: object) -> ThinkingConfig:
    """Return the settings updated by the `thinking` of a row or a caller; null: the defaults.

    Raises UserError for unknown names and wrong values.
    """
    if isinstance(value, ThinkingConfig):
        return value
    if value is None:
        return ThinkingConfig()
    if not isinstance(value, dict):
        wrong = f"decode.thinking={shortened(repr(value))} is not allowed: give {{NAME: VALUE, ...}}"
        raise UserError(wrong, ErrorCode.wrong_type, "decode.thinking")
    hints: dict[str, Any] = get_type_hints(ThinkingConfig)
    for name, setting in value.items():
        dotted = f"decode.thinking.{shortened(str(name))}"
        if name not in hints:
            problem = f"{dotted} does not exist: {list_known_names(list(hints), str(name))}"
            raise UserError(problem, ErrorCode.unknown_name, dotted)
        if type(setting) not in (get_args(hints[name]) or (hints[name],)):
            expected = getattr(hints[name], "__name__", hints[name]) if not get_args(hints[name]) else hints[name]
            problem = f"{dotted}={shortened(repr(setting))} is not of type {expected}"
            raise UserError(problem, ErrorCode.wrong_type, dotted)
    return replace(known, **value)
