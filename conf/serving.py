"""Settings of the server and of chats. A part of schema.py."""

import math
from dataclasses import dataclass, field

from conf.errors import check
from conf.support.sizes import num_bytes

FORMATS = ("auto", "none", "text", "hermes", "llama3", "mistral", "deepseek", "kimi", "chatglm3", "glm4")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass
class ServeConfig:
    """An HTTP server with OpenAI's API."""

    host: str = "127.0.0.1"
    """Address to listen on. Addresses other than loopback need API keys."""
    port: int = 8000
    """0: a free port, which the first line of the output names."""
    model_name: str | None = None
    """Name that requests give as `model`; null: the name of the model's folder or file."""
    api_keys: str | None = None
    """File with a name and a key per line; null: the lines of the environment's QUINTET_API_KEYS, or no keys."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names that the Host header may have in addition to `host` and the loopback names."""
    allowed_origins: list[str] = field(default_factory=list)
    """Origins of web pages that may call the server (CORS); empty: none."""
    batch_size: int = 64
    """Most requests that run at once, with all their samples."""
    max_waiting: int = 64
    """Most sequences in the waiting queue. A request beyond the limit gets status 429."""
    max_waiting_tokens: int = 131072
    """Most prompt tokens in the waiting queue."""
    max_step_ms: float = 200.0
    """Target for the longest step: longer prompts are computed in chunks, so that they do not stall other requests."""
    request_timeout_s: float = 600.0
    """A request that takes longer ends with status 504."""
    send_timeout_s: float = 60.0
    """A connection is closed if its client reads nothing for this time."""
    keep_alive_s: float = 60.0
    """An idle connection is closed after this time."""
    drain_s: float = 30.0
    """Time that accepted requests have to finish after SIGTERM."""
    stall_s: float = 120.0
    """A step that takes longer counts as hung, and the engine is restarted."""
    max_body: str = "4MB"
    """Most bytes of a request."""
    max_connections: int = 1000
    chat_template: str = "auto"
    """As in predict."""
    response_template: str = "auto"
    """How responses mark reasoning and tool calls.

    auto: by the model's family; none: all text is content; or the name of a format.
    """
    batches: str | None = None
    """Folder of /v1/files and /v1/batches; batches continue after a restart. null: these routes are disabled."""
    max_upload: str = "200MB"
    """Most bytes of a file of /v1/files."""
    replicas: int = 1
    """Engines that share the requests; more than one run on Ray."""

    def __post_init__(self) -> None:
        check(bool(self.host), "serve.host", repr(self.host), "an address, such as 127.0.0.1")
        check(0 <= self.port < 65536, "serve.port", self.port, "a number from 0 to 65535")
        check(self.model_name != "", "serve.model_name", repr(self.model_name), "a name, or null")
        check(num_bytes(self.max_body) > 0, "serve.max_body", self.max_body, "a size such as 4MB")
        check(num_bytes(self.max_upload) > 0, "serve.max_upload", self.max_upload, "a size such as 200MB")
        unused = "200MB, or serve.batches=FOLDER too: without it there are no files"
        check(self.batches is not None or self.max_upload == "200MB", "serve.max_upload", self.max_upload, unused)
        for name in ("batch_size", "max_waiting_tokens", "max_connections", "replicas"):
            check(getattr(self, name) > 0, f"serve.{name}", getattr(self, name), "a number above 0")
        check(self.max_waiting >= 0, "serve.max_waiting", self.max_waiting, "a number from 0")
        check(self.keep_alive_s < math.inf, "serve.keep_alive_s", self.keep_alive_s, "a finite number")
        for name in ("max_step_ms", "request_timeout_s", "send_timeout_s", "keep_alive_s", "stall_s"):
            check(getattr(self, name) > 0, f"serve.{name}", getattr(self, name), "a number above 0")
        check(self.drain_s >= 0, "serve.drain_s", self.drain_s, "a number from 0")
        check(bool(self.chat_template), "serve.chat_template", repr(self.chat_template), "auto, none or a Jinja file")
        check(
            self.response_template in FORMATS,
            "serve.response_template",
            repr(self.response_template),
            ", ".join(FORMATS),
        )


@dataclass
class ChatConfig:
    """A chat in the terminal, with the run's model or with a server."""

    url: str | None = None
    """Address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1, instead of the run's own model.

    The environment's OPENAI_API_KEY is the key for it.
    """
    model: str | None = None
    """The server's model; null: the first model that the server lists."""
    system: str | None = None
    """The system message."""
    chat_template: str = "auto"
    """As in predict, for the run's own model."""
    web: bool = False
    """Serve a web page at chat.host and chat.port instead."""
    host: str = "127.0.0.1"
    """Address of the page.

    Every client that reaches it can use the run's model, or the server with the key of this process.
    """
    port: int = 7860
    """Port of the page; 0: a free port."""

    def __post_init__(self) -> None:
        is_address = self.url is None or self.url.startswith(("http://", "https://"))
        check(is_address, "chat.url", repr(self.url), "an address that begins with http:// or https://, or null")
        allowed = "null, or chat.url=ADDRESS too: without it the model is the run's"
        check(self.model is None or self.url is not None, "chat.model", repr(self.model), allowed)
        for name in ("host", "port"):
            value, unset = getattr(self, name), getattr(ChatConfig, name)
            check(self.web or value == unset, f"chat.{name}", value, f"{unset}, or chat.web=true too")
        check(bool(self.host), "chat.host", repr(self.host), "an address, such as 127.0.0.1")
        check(0 <= self.port < 65536, "chat.port", self.port, "a number from 0 to 65535")
        unused = "auto with chat.url, whose server has templates of its own"
        check(self.url is None or self.chat_template == "auto", "chat.chat_template", self.chat_template, unused)
        check(bool(self.chat_template), "chat.chat_template", repr(self.chat_template), "auto or a Jinja file")
