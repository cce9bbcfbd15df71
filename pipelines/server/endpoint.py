"""Conversations with a server of the OpenAI API: POST /chat/completions, streamed."""

import json
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from conf.decoding import NEUTRAL, OF_LLAMA_CPP, DecodeConfig
from conf.errors import UserError, list_known_names, shortened
from models.tokenizers import Message
from pipelines.jobs.interrupt import Interruption
from pipelines.server.api.message_reader import add_delta

FIELDS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    **{name: name for name in OF_LLAMA_CPP},
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "seed": "seed",
}
"""Decode settings that servers accept, and their request fields. Our server also accepts the extensions of vLLM (top_k,
min_p and repetition_penalty) and of llama.cpp.
"""
PIECES = ("content", "reasoning_content", "tool_calls")
"""Fields of a delta that the page shows."""
DATA = "data:"
CONNECT_S = 10.0
END_OF_LINE = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the end may be half of CRLF


class Endpoint:
    """A model of a server. The API key is the environment variable OPENAI_API_KEY, if the server needs a key."""

    def __init__(self, url: str, model: str | None, decode: DecodeConfig, is_own: bool = False) -> None:
        """`model`: a model that the server lists; None: the first.

        `is_own`: whether it is the run's own server, which is reached without a proxy.

        Raises UserError if the server or the model does not exist, and if the key cannot be sent in a header.
        """
        try:
            import httpx  # here, because a conversation with the run's own model does not need httpx
        except ImportError as error:
            raise UserError("chat.url needs the package httpx: pip install 'quintet[chat]'") from error
        self._httpx = httpx
        self.asked_for = asked_for(decode)
        key = os.environ.get("OPENAI_API_KEY")
        if key and not (key.isascii() and key.isprintable()):
            raise UserError("OPENAI_API_KEY has a line break, or a character that no header takes: set it again")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_S)  # an answer may take any time, and the user can stop it
        self._connection: dict[str, Any] = {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout}
        self._connection["trust_env"] = not is_own
        self._url = url
        with self._explained(), httpx.Client(**self._connection) as client:
            response = client.get("/models")
            check_response(response)
            listed_models = response.json()["data"]
            self.models = [str(listed_model["id"]) for listed_model in listed_models]
            self.chat_format = _chat_format(listed_models[0]) if listed_models else None
        if not self.models:
            raise UserError(f"chat.url={url} lists no model: give the address of a server that has one")
        if model is not None and model not in self.models:
            raise UserError(f"chat.model={model} is none of the server's: {list_known_names(self.models, model)}")
        self.model = model or self.models[0]

    def answer(self, messages: list[Message], say: Callable[[str], None], signals: Interruption) -> str:
        """Stream the answer, as `Speaker.answer` in chat.py does. Reasoning content is printed but not returned."""
        body, content = self._body(self.model, messages, self.asked_for), ""
        with (
            self._explained(),
            self._httpx.Client(**self._connection) as client,
            client.stream("POST", "/chat/completions", json=body) as response,
        ):
            if not is_stream(response):
                response.read()
            check_stream(response)
            deltas, lines = Deltas(), EventLines()
            for part in signals.checked(response.iter_bytes()):
                for delta in deltas.read(lines.feed(part)):
                    for name in ("reasoning_content", "content"):
                        if piece := delta.get(name):
                            say(piece)
                    content += delta.get("content") or ""
                if deltas.have_ended:
                    break
            deltas.check()
        return content

    async def answers(self, model: str, messages: list[Message], settings: dict[str, Any]) -> AsyncIterator[Message]:
        """Yield the whole answer so far after each delta: content, reasoning_content and tool_calls.

        Closing the iterator ends the request. `settings`: request fields.
        """
        body, answer = self._body(model, messages, settings), dict[str, Any]()
        with self._explained():
            async with (
                self._httpx.AsyncClient(**self._connection) as client,
                client.stream("POST", "/chat/completions", json=body) as response,
            ):
                if not is_stream(response):
                    await response.aread()
                check_stream(response)
                deltas, lines = Deltas(), EventLines()
                async for part in response.aiter_bytes():
                    for delta in deltas.read(lines.feed(part)):
                        pieces = {name: delta[name] for name in PIECES if delta.get(name)}
                        if pieces:
                            add_delta(answer, pieces)
                            yield answer
                    if deltas.have_ended:
                        break
                deltas.check()

    def _body(self, model: str, messages: list[Message], settings: dict[str, Any]) -> dict[str, Any]:
        return {"model": model, "messages": messages, "stream": True, **settings}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a transport or protocol error into a UserError of one line."""
        try:
            yield
        except self._httpx.HTTPError as error:
            message = f"chat.url={self._url} cannot be reached ({error or type(error).__name__})"
            raise UserError(f"{message}: give the address of a server that runs") from error
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"chat.url={self._url} does not answer as OpenAI's API does: give its address with /v1"
            ) from error


def _chat_format(listed_model: dict[str, Any]) -> str | None:
    """Return how a server reads a model's answers; None if it does not tell."""
    form = listed_model.get("chat_format")
    if not isinstance(form, dict):
        return None
    reason = f", {form['reason']}" if form.get("reason") else ""
    return f"{form['name']} ({form['origin']}{reason})"


def asked_for(decode: DecodeConfig) -> dict[str, Any]:
    """Return the request fields for the settings of a run.

    Raises UserError for a setting that servers do not accept.
    """
    unset = DecodeConfig()
    replace(decode, **{name: getattr(unset, name) for name in FIELDS}).check_unset("with chat.url", "leave it out")
    values = {name: getattr(decode, name) for name in FIELDS}
    left_out = {name: (getattr(unset, name), NEUTRAL.get(name)) for name in FIELDS} | {"temperature": (None,)}
    return {FIELDS[name]: value for name, value in values.items() if value not in (*left_out[name], "auto")}


def delta_of(line: str) -> dict[str, Any] | None:
    """Return the delta in a line of a streamed answer; {} if the line has none, None at the end of the stream.

    Raises UserError if the server reports an error, and ValueError, KeyError, TypeError or AttributeError if the line
    does not follow the OpenAI API.
    """
    data = line.removeprefix(DATA).strip()
    if not line.startswith(DATA):  # a blank line, a comment, the name of an event
        return {}
    if data == "[DONE]":
        return None
    event = json.loads(data)
    if event.get("error") is not None:
        raise UserError(f"the server says: {_message(event)}")
    return dict(event["choices"][0].get("delta") or {}) if event.get("choices") else {}


class Deltas:
    """Reads deltas from the lines of a streamed answer, until [DONE]."""

    def __init__(self) -> None:
        self.have_ended = self._have_begun = False

    def read(self, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield the delta of each line. Raises as `delta_of` does."""
        for line in lines:
            delta = None if self.have_ended else delta_of(line)
            self.have_ended |= delta is None
            self._have_begun |= bool(delta)
            if delta:
                yield delta

    def check(self) -> None:
        """Raise ValueError for a stream without an answer."""
        if not (self._have_begun or self.have_ended):
            raise ValueError("nothing was streamed")


def is_stream(response: Any) -> bool:
    """Return whether a response is an event stream. Read the body of any other response before `check_stream`."""
    return bool(response.is_success) and response.headers.get("content-type", "").startswith("text/event-stream")


def check_stream(response: Any) -> None:
    """Raise UserError for an error response, and ValueError for a successful response that is not an event stream."""
    check_response(response)
    if not is_stream(response):
        raise ValueError("the answer is not an event stream")


def check_response(response: Any) -> None:
    """Raise UserError for an error response. Its body must have been read."""
    if not response.is_success:
        try:
            message = _message(response.json())
        except ValueError:
            message = shortened(response.text)
        raise UserError(f"the server answers {response.status_code}: {message}")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


class EventLines:
    """Splits a stream at CR, LF and CRLF only. U+2028, U+2029 and U+0085 are part of a text.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    def __init__(self) -> None:
        self._unfinished_line = b""

    def feed(self, content: bytes) -> list[str]:
        """Return the lines that end in this part of a stream. Raises UnicodeDecodeError for invalid UTF-8."""
        *lines, self._unfinished_line = END_OF_LINE.split(self._unfinished_line + content)
        return [line.decode() for line in lines]
