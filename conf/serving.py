"""Settings of the server and of chats. A part of schema.py."""

import math
from dataclasses import dataclass, field

from conf.constraints import check_fields, is_set, one_of, option
from conf.support.sizes import num_bytes

LOOPBACK = ("127.0.0.1", "::1", "localhost")
ADDRESS = (bool, "an address, such as 127.0.0.1")
STORE = {"response_store": is_set(give="memory", reason="without which nothing is stored")}


@dataclass
class ServeConfig:
    """An HTTP server with OpenAI's API."""

    host: str = option("127.0.0.1", form=ADDRESS)
    """Address to listen on. Addresses other than loopback need API keys."""
    port: int = option(8000, minimum=0, maximum=65535)
    """0: a free port, which the first line of the output names."""
    model_name: str | None = option(None, form=(bool, "a name, or null"))
    """Name that requests give as `model`; null: the name of the model's folder or file."""
    api_keys: str | None = None
    """File with a name and a key per line; null: the lines of the environment's QUINTET_API_KEYS, or no keys."""
    adapter_folders: list[str] = field(default_factory=list)
    """Folders below which admins may load LoRA adapters over HTTP; empty: none."""
    admin_keys: str | None = option(
        None, only_with={"adapter_folders": is_set(give="[FOLDER]", reason="without which there is nothing for admins")}
    )
    """File of admins' keys, of the form of `api_keys`; null: the lines of the environment's QUINTET_ADMIN_KEYS.

    They are valid on all routes.
    """
    allowed_hosts: list[str] = field(default_factory=list)
    """Names that the Host header may have in addition to `host` and the loopback names."""
    allowed_origins: list[str] = field(default_factory=list)
    """Origins of web pages that may call the server (CORS); empty: none."""
    batch_size: int = option(64, minimum=1)
    """Most requests that run at once, with all their samples."""
    max_waiting: int = option(64, minimum=0)
    """Most sequences in the waiting queue. A request beyond the limit gets status 429."""
    max_waiting_tokens: int = option(131072, minimum=1)
    """Most prompt tokens in the waiting queue."""
    max_step_ms: float = option(200.0, above=0)
    """Target for the longest step: longer prompts are computed in chunks, so that they do not stall other requests."""
    request_timeout_s: float = option(600.0, above=0)
    """A request that takes longer ends with status 504."""
    send_timeout_s: float = option(60.0, above=0)
    """A connection is closed if its client reads nothing for this time."""
    keep_alive_s: float = option(60.0, above=0, below=math.inf)
    """An idle connection is closed after this time."""
    drain_s: float = option(30.0, minimum=0)
    """Time that accepted requests have to finish after SIGTERM."""
    stall_s: float = option(120.0, above=0)
    """A step that takes longer counts as hung, and the engine is restarted."""
    max_body: str = option("4MB", form=(num_bytes, "a size such as 4MB"))
    """Most bytes of a request."""
    max_connections: int = option(1000, minimum=1)
    chat_template: str = option("auto", form=(bool, "auto, none or a Jinja file"))
    """As in predict."""
    response_template: str = option("auto", form=(bool, "auto, the name of a chat format, or a YAML file"))
    """How answers mark reasoning and tool calls: the chat format.

    auto: by the chat template and the vocabulary; none: all text is content; the name of an entry of
    models/chat/formats.yaml; or a YAML file with a description like the ones there.
    """
    batches: str | None = None
    """Folder of /v1/files and /v1/batches; batches continue after a restart. null: these routes are disabled."""
    max_upload: str = option(
        "200MB",
        form=(num_bytes, "a size such as 200MB"),
        only_with={"batches": is_set(give="FOLDER", reason="without which there are no files")},
    )
    """Most bytes of a file of /v1/files."""
    response_store: str | None = option(None, form=(bool, "memory, an SQLite file, or null"))
    """Where /v1/responses stores its responses: memory, or an SQLite file, which keeps them over a restart.

    null: nothing is stored, so a request contains its whole conversation.
    """
    response_store_size: str = option("200MB", form=(num_bytes, "a size such as 200MB"), only_with=STORE)
    """Most bytes of all stored responses. The oldest are deleted."""
    response_store_count: int = option(10000, minimum=1, only_with=STORE)
    """Most stored responses. The oldest are deleted."""
    response_store_age_s: float = option(2592000.0, above=0, only_with=STORE)
    """A stored response expires after this time."""
    traces: str | None = option(
        None,
        form=(lambda url: url.startswith(("http://", "https://")), "an address that begins with http:// or https://"),
    )
    """Address of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318/v1/traces (extra `otel`).

    null: no traces.
    """
    trace_texts: bool = option(
        False, only_with={"traces": is_set(give="ADDRESS", reason="without which there are no spans")}
    )
    """Add the texts of prompts and answers to the spans, at most 65,536 characters per attribute.

    Everyone who can read the traces can read them.
    """
    replicas: int = option(1, minimum=1)
    """Engines that share the requests; more than one run on Ray."""

    def __post_init__(self) -> None:
        check_fields(self, "serve")


@dataclass
class ChatConfig:
    """A chat in the terminal, with the run's model or with a server."""

    url: str | None = option(
        None,
        form=(
            lambda url: url.startswith(("http://", "https://")),
            "an address that begins with http:// or https://, or null",
        ),
    )
    """Address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1, instead of the run's own model.

    The environment's OPENAI_API_KEY is the key for it.
    """
    model: str | None = option(
        None, only_with={"url": is_set(give="ADDRESS", reason="without which the model is the run's")}
    )
    """The server's model; null: the first model that the server lists."""
    system: str | None = None
    """The system message."""
    chat_template: str = option(
        "auto",
        form=(bool, "auto or a Jinja file"),
        not_with={"url": is_set(reason="whose server has templates of its own")},
    )
    """As in predict, for the run's own model."""
    web: bool = False
    """Serve a web page at chat.host and chat.port instead."""
    host: str = option("127.0.0.1", form=ADDRESS, only_with={"web": one_of(True)})
    """Address of the page.

    Every client that reaches it can use the run's model, or the server with the key of this process.
    """
    port: int = option(7860, minimum=0, maximum=65535, only_with={"web": one_of(True)})
    """Port of the page; 0: a free port."""

    def __post_init__(self) -> None:
        check_fields(self, "chat")
