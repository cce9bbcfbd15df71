"""A server with scripted answers to conversations. It keeps the requests that it receives."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def chunk(**delta: Any) -> str:
    """Return a line of a streamed answer."""
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}"


@dataclass
class ChatServer:
    url: str = ""
    models: list[str] = field(default_factory=lambda: ["first", "second"])
    status: int = 200
    content_type: str = "text/event-stream"
    """Lines of an answer to a conversation."""
    lines: list[str] = field(default_factory=list)
    """The answer. If the request contains `endless`, `more` is sent repeatedly until the client disconnects."""
    more: str = chunk(content="更多 ")
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when the client of an endless answer has disconnected."""


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    state, ends = ChatServer(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, json.dumps({"data": [{"id": model} for model in state.models]}))

        def do_POST(self) -> None:
            state.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            state.keys.append(self.headers["Authorization"])
            if "endless" not in state.asked[-1]["messages"][-1]["content"]:
                return self.send(state.status, "".join(f"{line}\n" for line in state.lines))
            try:
                self.send(200, "")
                while not ends.wait(0.01):
                    self.wfile.write(f"{state.more}\n\n".encode())
            except OSError:
                state.left.set()

        def send(self, status: int, content: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", state.content_type)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield state
        finally:
            ends.set()
            server.shutdown()
            thread.join()
