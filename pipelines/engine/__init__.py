"""Floor 4a, the engine: token ids in, token ids and text out, many sequences at once.

`request`, `block_manager` and `scheduler` decide and import no torch; `batch`, `kv_cache`, `runner` and `sampler` compute.
"""

from pipelines.engine.engine import Engine
from pipelines.engine.request import Completion, Output, Request, SamplingParams

__all__ = ["Completion", "Engine", "Output", "Request", "SamplingParams"]
