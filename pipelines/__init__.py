"""Floor 4, the stages and faces: loading, the predict job, the Python pipeline, streamers, reports. `engine/` is floor 4a."""

from pipelines.pipeline import TextGenerationPipeline, pipeline
from pipelines.streamers import StreamerTimeout, TextIteratorStreamer, TextStreamer

__all__ = ["StreamerTimeout", "TextGenerationPipeline", "TextIteratorStreamer", "TextStreamer", "pipeline"]
