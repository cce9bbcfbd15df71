"""`task=chat`: a conversation in the terminal, with the run's own model or with a server's model."""

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from conf.errors import UserError
from conf.schema import RunConfig, Task
from conf.serving import ChatConfig, ServeConfig
from conf.support.terminal import escape_control_chars, escape_line
from models.tokenizers import Message
from pipelines.engine.request import TokenLogprobs
from pipelines.jobs import report
from pipelines.jobs.interrupt import Interrupted, Interruption, interruption
from pipelines.jobs.prompt_encoder import PromptEncoder
from pipelines.jobs.prompts import PromptRow
from pipelines.loading.load_engine import load_engine
from pipelines.server.endpoint import Endpoint

HELP = """\
/reset          forget the conversation
/system TEXT    forget it, and tell the model TEXT before the next one; without TEXT: nothing
/help           these lines
/exit, Ctrl-D   end
Ctrl-C          stop the answer
//TEXT          say /TEXT"""

Say = Callable[[str], None]
"""Prints a piece of an answer."""


class Speaker(Protocol):
    """A model that answers a conversation."""

    def answer(self, messages: list[Message], say: Say, signals: Interruption) -> str:
        """Return the answer, and pass its pieces to `say` as they are generated.

        Raises Interrupted after a signal, and UserError if the model cannot answer.
        """


class LocalModel:
    """The model of the run."""

    def __init__(self, run: RunConfig) -> None:
        """Load the model. Raises UserError as `load_engine` does, and if the model has no tokenizer."""
        with report.progress_bar() as progress:
            self._engine = load_engine(run, 1, progress)
        if self._engine.tokenizer is None:
            raise UserError("there is no tokenizer, so no text: give model.tokenizer=PATH")
        self._encoder = PromptEncoder(self._engine.tokenizer, True, run.chat.chat_template)
        self._decode = self._engine.requests.resolve(run.decode)
        self._engine.requests.check(self._decode)

    def answer(self, messages: list[Message], say: Say, signals: Interruption) -> str:
        def sink(sample: int, token_ids: list[int], text: str, logprobs: list[TokenLogprobs]) -> None:
            say(text)

        prompt = self._encoder.encode(PromptRow(0, messages=messages))
        request = self._engine.request(0, prompt.token_ids, self._decode, sink)
        (output,) = self._engine.generate([request], on_step=signals.check)
        if output.error:
            raise output.error
        return output.completions[0].text or ""


class Conversation:
    """The turns so far, and the system prompt."""

    def __init__(self, speaker: Speaker, system: str | None) -> None:
        self._speaker = speaker
        self._system = system
        self._turns: list[Message] = []

    def command(self, line: str) -> bool:
        """Run a command, a line that begins with /. Return whether the conversation goes on."""
        name, _, argument = line.partition(" ")
        if name == "/exit":
            return False
        if name in ("/reset", "/system"):
            self._turns.clear()
            if name == "/system":
                self._system = argument.strip() or None
        elif name == "/help":
            print(HELP)
        else:
            print(escape_line(f"{name} is no command: /help lists them, and //{line[1:]} says it to the model"))
        return True

    def say(self, text: str) -> None:
        """Send a message to the model and print the answer.

        An interrupted answer is kept up to the interruption. After an error, neither the message nor the answer is
        kept.
        """
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        turn, pieces = {"role": "user", "content": text}, list[str]()

        def print_piece(piece: str) -> None:
            pieces.append(piece)
            print(escape_control_chars(piece) if sys.stdout.isatty() else piece, end="", flush=True)

        try:
            with interruption() as signals:
                answer = self._speaker.answer([*system, *self._turns, turn], print_piece, signals)
        except Interrupted as interrupted:
            if interrupted.code != 128 + signal.SIGINT:
                raise
            answer = "".join(pieces)
        except UserError as error:
            print(escape_line(f"error: {error}"))
            return
        print()
        self._turns += [turn, {"role": "assistant", "content": answer}]


def run_chat(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Chat until standard input ends. Raises UserError if the model or the server cannot be reached."""
    if run.decode.n > 1:
        raise UserError(f"decode.n={run.decode.n} is not used by task=chat, whose answers are single: leave it at 1")
    if run.decode.max_new_tokens is None:  # an answer ends by itself
        run = replace(run, decode=replace(run.decode, max_new_tokens="auto"))
    endpoint = Endpoint(run.chat.url, run.chat.model, run.decode) if run.chat.url else None
    if endpoint is not None:
        print(escape_line(f"{run.chat.url}: {endpoint.model}; the run's own model is not loaded"), file=sys.stderr)
    if run.chat.web:
        report.write_run(output_dir, dump(run, output_dir), {})
        _show_page(run, endpoint, output_dir)
        return
    speaker: Speaker = endpoint or LocalModel(run)
    report.write_run(output_dir, dump(run, output_dir), {})
    talk(Conversation(speaker, run.chat.system))


def _show_page(run: RunConfig, endpoint: Endpoint | None, output_dir: Path) -> None:
    from pipelines.server.chat_page import show_page  # here, because Gradio takes seconds to import

    if endpoint is not None:
        show_page(endpoint, run.chat)
        return
    from pipelines.server.serve import local_server

    config = ServeConfig(port=0, chat_template=run.chat.chat_template)
    with local_server(replace(run, task=Task.serve, chat=ChatConfig(), serve=config), output_dir) as url:
        show_page(Endpoint(url, run.chat.model, run.decode, is_own=True), run.chat)


def talk(conversation: Conversation) -> None:
    while (line := _read_line()) is not None:
        if line.startswith("/") and not line.startswith("//"):
            if not conversation.command(line):
                return
        elif line.strip():
            conversation.say(line.removeprefix("/") if line.startswith("//") else line)


def _read_line() -> str | None:
    if sys.stdin is None:
        return None
    if sys.stdin.isatty():
        import readline  # noqa: F401  line editing for input()
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 ({error}): convert it first") from error
