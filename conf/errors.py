"""The exception for what a user can put right: `run.py` prints its one line and exits with 1, without a traceback."""


class UserError(ValueError):
    """What was given, what is allowed, and what to do, in one line."""
