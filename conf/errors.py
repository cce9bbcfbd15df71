"""UserError: an error that the user can fix. `run.py` prints it as one line and exits with 1, without a traceback."""

from collections.abc import Collection
from enum import Enum


class ErrorCode(Enum):
    """The kind of mistake, for programs and tests. The message is for people and may change."""

    out_of_range = "out_of_range"  # a number beyond its limits
    unknown_value = "unknown_value"  # none of the allowed values
    malformed = (
        "malformed"  # a value of the wrong form: an empty text, a size without a number, a wrong entry of a list
    )
    wrong_type = "wrong_type"
    unknown_name = "unknown_name"  # a setting that does not exist
    needs_other = "needs_other"  # a setting that is used only with a value of another setting
    excludes = "excludes"  # settings that contradict each other
    other = "other"  # all other mistakes


class UserError(ValueError):
    """An error of one line: the given value, the allowed values, and the remedy.

    `key`: the dotted key of the setting; None if no setting is wrong.
    """

    def __init__(self, message: str, code: ErrorCode = ErrorCode.other, key: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.key = key


class Difference(UserError):
    """A comparison whose result is a difference. The process exits with code 3."""

    exit_code = 3


SHOWN = 200  # characters of a value that an error quotes


def shortened(value: str) -> str:
    """Return a value as an error quotes it. A value of a row may have megabytes."""
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}..."


def check(holds: bool, key: str, value: object, allowed: str, code: ErrorCode = ErrorCode.other) -> None:
    if not holds:
        raise UserError(f"{key}={shortened(str(value))} is not allowed: give {allowed}", code, key)


def list_known_names(names: Collection[str], unknown_name: str) -> str:
    """Return the end of an error about an unknown name: all names, and the name closest to `unknown_name`."""
    return f"there are {', '.join(names)}{did_you_mean(names, unknown_name)}"


def did_you_mean(names: Collection[str], unknown_name: str) -> str:
    """Return ": did you mean NAME?" if a name resembles `unknown_name`, else an empty text."""
    import difflib  # imported here, because only errors need it

    return "".join(f": did you mean {name}?" for name in difflib.get_close_matches(unknown_name, names, n=1))
