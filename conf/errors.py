"""The exception for what a user can put right: `run.py` prints its one line and exits with 1, without a traceback."""

from collections.abc import Collection


class UserError(ValueError):
    """What was given, what is allowed, and what to do, in one line."""


SHOWN = 200  # characters of a value that an error quotes


def shortened(value: str) -> str:
    """A value as an error quotes it: a row of a job may hold one of megabytes."""
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}..."


def check(holds: bool, key: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{key}={shortened(str(value))} is not allowed: give {allowed}")


def there_are(names: Collection[str], given: str) -> str:
    """The end of an error about a name that does not exist: all names, and the one that `given` resembles."""
    return f"there are {', '.join(names)}{did_you_mean(names, given)}"


def did_you_mean(names: Collection[str], given: str) -> str:
    """A question after the names, where one of them resembles `given`; else nothing."""
    import difflib  # here, because only an error needs it

    return "".join(f": did you mean {name}?" for name in difflib.get_close_matches(given, names, n=1))
