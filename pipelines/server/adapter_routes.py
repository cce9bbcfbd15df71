"""The routes that load and unload LoRA adapters, for admins: vLLM's answer in text, and SGLang's in JSON."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from pipelines.replicas.engine_process.client import EngineGone
from pipelines.replicas.served_adapters import AdapterRefused, Reason
from pipelines.server.api.adapters import (
    LOAD,
    UNLOAD,
    AdaptersAnswer,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    adapters_body,
)
from pipelines.server.api.errors import ApiError, engine_gone
from pipelines.server.api.parsing import parse_request
from pipelines.server.engine_session import loaded
from pipelines.server.openapi import takes
from pipelines.server.service import Service

STATUSES = {Reason.invalid: 400, Reason.missing: 404, Reason.busy: 409}
FURTHER = (403, 409)
BODIES = (LoadAdapterRequest, UnloadAdapterRequest)


def add_adapters(app: FastAPI, service: Service) -> None:
    def answer(path: str, name: str, change: str) -> Response:
        if path.startswith("/v1/"):
            return PlainTextResponse(f"Success: LoRA adapter '{name}' {change} successfully.")
        return JSONResponse(adapters_body({adapter.name: adapter.root for adapter in service.adapters.present}))

    async def load_lora_adapter(request: Request) -> Response:
        """Load a LoRA adapter below serve.adapter_folders. All engines have it before the answer."""
        body = parse_request(LoadAdapterRequest, await request.body())
        request.state.record.model = body.lora_name
        loaded(service.engine)
        with _refusals():
            await service.adapters.load(body.lora_name, body.lora_path, bool(body.load_inplace), bool(body.pinned))
        return answer(request.url.path, body.lora_name, "added")

    async def unload_lora_adapter(request: Request) -> Response:
        """Unload a LoRA adapter when its requests have finished. Its memory is free before the answer."""
        body = parse_request(UnloadAdapterRequest, await request.body())
        request.state.record.model = body.lora_name
        with _refusals():
            await service.adapters.unload(body.lora_name)
        return answer(request.url.path, body.lora_name, "removed")

    for paths, kind, change in (
        (LOAD, LoadAdapterRequest, load_lora_adapter),
        (UNLOAD, UnloadAdapterRequest, unload_lora_adapter),
    ):
        for path in paths:
            form = takes(kind, AdaptersAnswer, *FURTHER)
            if path.startswith("/v1/"):
                form["responses"][200]["content"] = {"text/plain": {}}
                form |= {"response_model": None, "response_class": PlainTextResponse}
            app.post(path, **form)(change)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except AdapterRefused as refused:
        headers = {"retry-after": "1"} if refused.reason is Reason.busy else None
        raise ApiError(STATUSES[refused.reason], refused.message, param=refused.field, headers=headers) from refused
    except EngineGone as gone:
        raise engine_gone(gone, 503) from gone
