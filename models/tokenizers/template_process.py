"""Render chat templates in a separate process with limits of time and memory, which a sandbox does not provide."""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conf.errors import UserError

PROGRAM = Path(__file__).with_name("templates.py")
CPU_S = 2.0  # seconds of CPU time per conversation; real models need less than a thousandth
MEMORY = 2**30  # bytes of address space; an idle process has 60 MB
MAX_CHARACTERS = 2**20  # of the text, in addition to four times the request; protects the tokenizer from gigabytes
REMEDY = "give predict.chat_template=PATH, or prompts instead of messages"


class TemplateProcess:
    """A process that renders the conversations of one tokenizer one at a time.

    It starts with the first conversation.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._names: dict[str, frozenset[str]] = {}

    def render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the conversation as text. Raises UserError if the template fails or exceeds the limits.

        `arguments`: values of other template variables.
        """
        variables = {**special_tokens, **arguments, "add_generation_prompt": add_generation_prompt, "tools": tools}
        return str(self._answer("text", template, messages, variables))

    def names(self, template: str) -> frozenset[str]:
        """Return the variables that a template reads and does not set. Raises UserError as `render` does."""
        if template not in self._names:
            self._names = {
                template: frozenset(self._answer("names", template))
            }  # caches only the last template: a second one is rare
        return self._names[template]

    def _answer(self, kind: str, *request: Any) -> Any:
        # Only JSON: any other object of a Python caller becomes the name of its type.
        line = json.dumps([kind, *request], default=lambda value: f"<{type(value).__name__}>").encode() + b"\n"
        with self._turn:
            answer = self._ask(line)
        if "error" in answer:
            raise UserError(f"the chat template does not take these messages: {answer['error']}")
        return answer[kind]

    def _ask(self, request: bytes) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        line = b""
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            # The process has ended, or an interrupt came first: the next conversation starts a new process.
            if not line.endswith(b"\n"):
                self._process = None
                self._end()
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        if process.returncode == -signal.SIGKILL:  # killed from outside: not the template's fault
            raise OSError("the process that renders chat templates was killed: is the memory full?")
        slow = process.returncode == -signal.SIGPROF
        reason = f"it takes more than {CPU_S:g} s" if slow else f"its process ended with {process.returncode}"
        raise UserError(f"the chat template was stopped, because {reason}: {REMEDY}")

    def _start(self) -> "subprocess.Popen[bytes]":
        # -P: no module in the program's folder can replace a package.
        command = [sys.executable, "-P", str(PROGRAM), str(CPU_S), str(MEMORY), str(MAX_CHARACTERS)]
        # A separate session: a signal to the whole job, for example Ctrl-C, does not reach this process. Its owner ends
        # it.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._end = weakref.finalize(self, _end, process)  # also when this object is freed, and at exit
        return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()
