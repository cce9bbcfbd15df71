"""UserError: an error that the user can fix. `run.py` prints it as one line and exits with 1, without a traceback."""

from collections.abc import Collection


class UserError(ValueError):
    """An error of one line: the given value, the allowed values, and the remedy."""


SHOWN = 200  # characters of a value that an error quotes


def shortened(value: str) -> str:
    """Return a value as an error quotes it. A value of a row may have megabytes."""
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}..."


def check(holds: bool, key: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{key}={shortened(str(value))} is not allowed: give {allowed}")


def list_known_names(names: Collection[str], given: str) -> str:
    """Return the end of an error about an unknown name: all names, and the name closest to `given`."""
    return f"there are {', '.join(names)}{did_you_mean(names, given)}"


def did_you_mean(names: Collection[str], given: str) -> str:
    """Return ": did you mean NAME?" if a name resembles `given`, else an empty text."""
    import difflib  # imported here, because only errors need it

    return "".join(f": did you mean {name}?" for name in difflib.get_close_matches(given, names, n=1))
