"""Requests that load and unload LoRA adapters, and their answers, in the formats of vLLM's and SGLang's API."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pipelines.server.api.answer_shapes import AnswerShape
from pipelines.server.api.requests import Name, Shape

LOAD = ("/v1/load_lora_adapter", "/load_lora_adapter")
UNLOAD = ("/v1/unload_lora_adapter", "/unload_lora_adapter")
"""Paths of vLLM and of SGLang."""
ADMIN = frozenset((*LOAD, *UNLOAD))
"""The paths that need the key of an admin."""


class LoadAdapterRequest(Shape):
    """An adapter to load."""

    lora_name: Name
    """Name that requests give as `model`."""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its folder: an absolute path, or a path from one of serve.adapter_folders."""
    load_inplace: bool | None = None
    """Whether it replaces an adapter of this name. The default is false."""
    pinned: bool | None = None
    """Whether it stays in its slot from its first request on. The default is false."""
    is_3d_lora_weight: Literal[False] | None = None


class UnloadAdapterRequest(Shape):
    """An adapter to unload."""

    lora_name: Name


class AdaptersAnswer(AnswerShape):
    """SGLang's answer."""

    success: Literal[True]
    error_message: Literal[""]
    loaded_adapters: dict[str, str]
    """The path of each adapter, by name."""


def adapters_body(roots: dict[str, str]) -> dict[str, Any]:
    return {"success": True, "error_message": "", "loaded_adapters": roots}
