"""Kill a process in the middle of its work, for tests of the files that it leaves."""

import os
import signal
from typing import Any


def before(owner: Any, name: str, moment: int) -> None:
    """Send SIGKILL before call number `moment` of `owner`'s function."""
    real, calls = getattr(owner, name), []

    def hooked(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(owner, name, hooked)
