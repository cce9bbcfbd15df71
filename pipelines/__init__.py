"""Pipelines from a config to results, and the public Python names.

Folders, each of which imports only from earlier ones: engine, jobs, ranks, loading, replicas, server, tasks, python.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.python.factory import pipeline
    from pipelines.python.llm import LLM
    from pipelines.python.pooled_pipeline import EmbeddingPipeline, ScorePipeline
    from pipelines.python.sampling_params import SamplingParams, StructuredOutputsParams
    from pipelines.python.streamers import StreamerTimeout, TextIteratorStreamer, TextStreamer
    from pipelines.python.text_pipeline import TextGenerationPipeline

__all__ = [
    "LLM",
    "EmbeddingPipeline",
    "SamplingParams",
    "ScorePipeline",
    "StreamerTimeout",
    "StructuredOutputsParams",
    "TextGenerationPipeline",
    "TextIteratorStreamer",
    "TextStreamer",
    "pipeline",
]

_MODULES = {
    "LLM": "pipelines.python.llm",
    "SamplingParams": "pipelines.python.sampling_params",
    "StructuredOutputsParams": "pipelines.python.sampling_params",
    "EmbeddingPipeline": "pipelines.python.pooled_pipeline",
    "ScorePipeline": "pipelines.python.pooled_pipeline",
    "StreamerTimeout": "pipelines.python.streamers",
    "TextGenerationPipeline": "pipelines.python.text_pipeline",
    "TextIteratorStreamer": "pipelines.python.streamers",
    "TextStreamer": "pipelines.python.streamers",
    "pipeline": "pipelines.python.factory",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    The modules import torch, and the server's HTTP process must run without torch.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
