"""Floor 4, the stages and faces: loading, the predict job, the Python pipeline, streamers, reports. `engine/` is floor 4a."""

from pipelines.pipeline import TextGenerationPipeline, pipeline
from pipelines.pooled_pipeline import EmbeddingPipeline, ScorePipeline
from pipelines.streamers import StreamerTimeout, TextIteratorStreamer, TextStreamer

__all__ = [
    "EmbeddingPipeline",
    "ScorePipeline",
    "StreamerTimeout",
    "TextGenerationPipeline",
    "TextIteratorStreamer",
    "TextStreamer",
    "pipeline",
]
