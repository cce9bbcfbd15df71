"""How a process ends in the middle of its work, for tests of what is left."""

import os
import signal
from typing import Any


def before(owner: Any, name: str, moment: int) -> None:
    """SIGKILL before the call of `owner`'s function number `moment`."""
    real, calls = getattr(owner, name), []

    def hooked(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(owner, name, hooked)
