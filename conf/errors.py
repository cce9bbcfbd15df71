"""The exception for what a user can put right: `run.py` prints its one line and exits with 1, without a traceback."""


class UserError(ValueError):
    """What was given, what is allowed, and what to do, in one line."""


def check(holds: bool, key: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{key}={value} is not allowed: give {allowed}")
