"""`chat.web=true`: conversations with a server in a web page made with Gradio.

The page loads nothing from other hosts.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from conf.errors import UserError
from conf.serving import ChatConfig
from models.tokenizers import Message
from pipelines.server.api.errors import ApiError
from pipelines.server.chat_turns import conversation, read_tools, shown
from pipelines.server.endpoint import Endpoint
from pipelines.server.hosts import HostRule

try:
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # Gradio reads it at import
    import gradio
    from starlette.middleware import Middleware
    from starlette.responses import JSONResponse
except ImportError as error:
    raise UserError("chat.web=true needs the package gradio: pip install 'quintet[chat]'") from error

POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'"
SLIDERS = {  # request fields: minimum, maximum, step, and the slider's initial value if the run does not set the field
    "temperature": (0.0, 2.0, 0.05, 1.0),
    "top_p": (0.01, 1.0, 0.01, 1.0),
    "max_tokens": (1, 4096, 1, 512),
}


class OnlyItself:
    """ASGI middleware: accepts only this machine's host names, refuses uploads, and sets a content security policy."""

    def __init__(self, app: Callable[..., Awaitable[None]], host: str) -> None:
        self._app = app
        self._hosts = HostRule([host])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._hosts.check(scope, dict(scope["headers"]).get(b"host"))
                if scope["path"].rstrip("/").endswith("/upload"):
                    raise ApiError(403, "the page accepts no files")
            except ApiError as error:
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})
                else:
                    await JSONResponse(error.body(), error.status)(scope, receive, send)
                return

        async def with_policy(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self._app(scope, receive, with_policy)


def page(endpoint: Endpoint, system: str | None) -> Any:
    """Return the Gradio page for conversations with the endpoint's models."""
    fixed = {name: value for name, value in endpoint.asked_for.items() if name not in SLIDERS}

    async def answer(
        text: str,
        history: list[Any],
        model: str,
        system_prompt: str,
        tools: str | None,
        temperature: float,
        top_p: float,
        max_tokens: float,
    ) -> AsyncIterator[list[dict[str, Any]]]:
        before = [{"role": "system", "content": system_prompt}] if system_prompt else []
        settings = {**fixed, "temperature": temperature, "top_p": top_p, "max_tokens": int(max_tokens)}
        message: Message = {}
        try:
            settings |= read_tools(tools or "")
            async for message in endpoint.answers(model, [*before, *conversation(history, text)], settings):
                yield shown(message, is_complete=False)
        except UserError as error:
            raise gradio.Error(str(error), print_exception=False) from error
        yield shown(message, is_complete=True)

    with gradio.Blocks(title="Quintet", analytics_enabled=False, fill_height=True) as blocks:
        info = f"chat format: {endpoint.chat_format}" if endpoint.chat_format else None
        model = gradio.Dropdown(endpoint.models, value=endpoint.model, label="Model", info=info, render=False)
        system_prompt = gradio.Textbox(system or "", label="System prompt", render=False)
        tools = gradio.Code(
            label="Tools: a JSON list as in OpenAI's API. Behind a call, your text is its result.",
            language="json",
            render=False,
        )
        sliders = [
            gradio.Slider(least, most, endpoint.asked_for.get(name, begin), step=step, label=name, render=False)
            for name, (least, most, step, begin) in SLIDERS.items()
        ]
        gradio.ChatInterface(
            answer,
            chatbot=gradio.Chatbot(buttons=["copy", "copy_all"], height="70vh", show_label=False),
            additional_inputs=[model, system_prompt, tools, *sliders],
            additional_inputs_accordion=gradio.Accordion("Model, tools and sampling", open=False, render=False),
            concurrency_limit=None,
            api_visibility="private",
        )
    return blocks


def show_page(endpoint: Endpoint, config: ChatConfig) -> None:
    """Serve the page until the process is interrupted. Raises UserError if the address cannot be bound."""
    blocks = page(endpoint, config.system)
    try:
        _, url, _ = blocks.launch(
            server_name=config.host,
            server_port=config.port or None,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            ssr_mode=False,
            footer_links=[],
            enable_monitoring=False,
            app_kwargs={
                "middleware": [Middleware(OnlyItself, host=config.host)],
                "docs_url": None,
                "redoc_url": None,
                "openapi_url": None,
            },
            theme=gradio.themes.Base(font="sans-serif", font_mono="monospace"),
        )
    except OSError as error:
        message = f"chat.host={config.host} chat.port={config.port} cannot be listened on ({error})"
        raise UserError(f"{message}: give another chat.port") from error
    print(f"the page is at {url}", flush=True)
    blocks.block_thread()
