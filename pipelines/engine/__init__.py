"""The inference engine: it takes token ids, runs many sequences at once, and returns token ids and text.

`request`, `block_manager` and `scheduler` decide and do not import torch. `batch`, `kv_cache`, `executor` and `sampler`
compute.
"""

from pipelines.engine.engine import Engine, ProbeResult
from pipelines.engine.kv_cache import slot_cost
from pipelines.engine.request import Completion, Output, Request, SamplingParams, Sequence

__all__ = ["Completion", "ProbeResult", "Engine", "Output", "Request", "SamplingParams", "Sequence", "slot_cost"]
