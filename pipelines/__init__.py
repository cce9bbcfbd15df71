"""Floor 4: the tasks, the stages from a config to an engine, and the Python APIs.

`engine/` is floor 4a, the server is floor 4b.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.llm import LLM
    from pipelines.pooled_pipeline import EmbeddingPipeline, ScorePipeline
    from pipelines.sampling_params import SamplingParams, StructuredOutputsParams
    from pipelines.streamers import StreamerTimeout, TextIteratorStreamer, TextStreamer
    from pipelines.text_pipeline import TextGenerationPipeline, pipeline

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
    "LLM": "pipelines.llm",
    "SamplingParams": "pipelines.sampling_params",
    "StructuredOutputsParams": "pipelines.sampling_params",
    "EmbeddingPipeline": "pipelines.pooled_pipeline",
    "ScorePipeline": "pipelines.pooled_pipeline",
    "StreamerTimeout": "pipelines.streamers",
    "TextGenerationPipeline": "pipelines.text_pipeline",
    "TextIteratorStreamer": "pipelines.streamers",
    "TextStreamer": "pipelines.streamers",
    "pipeline": "pipelines.text_pipeline",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    The modules import torch, and the server's HTTP process must run without torch.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
