"""UserError, for what a user can put right. `run.py` prints its one line and exits with 1, without a traceback."""

from collections.abc import Collection


class UserError(ValueError):
    """An error of one line: what was given, what is allowed, and what to do."""


SHOWN = 200  # characters of a value that an error quotes


def shortened(value: str) -> str:
    """Return a value as an error quotes it. A row may hold one of megabytes."""
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}..."


def check(holds: bool, key: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{key}={shortened(str(value))} is not allowed: give {allowed}")


def list_known_names(names: Collection[str], given: str) -> str:
    """Return the end of an error about an unknown name: all names, and the one that `given` resembles."""
    return f"there are {', '.join(names)}{did_you_mean(names, given)}"


def did_you_mean(names: Collection[str], given: str) -> str:
    """Return ": did you mean NAME?" if one of the names resembles `given`, else an empty text."""
    import difflib  # here, because only an error needs it

    return "".join(f": did you mean {name}?" for name in difflib.get_close_matches(given, names, n=1))
