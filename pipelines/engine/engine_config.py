"""The settings of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conf.speculation import Speculate
from pipelines.engine.request import ContextLimit


@dataclass(frozen=True)
class EngineConfig:
    context: ContextLimit
    eos_token_ids: frozenset[int]
    decode_defaults: dict[str, Any]
    """DecodeConfig settings that apply where a request sets none."""
    max_num_requests: int
    """The maximum number of requests that run at once."""
    max_batched_tokens: int
    """The token budget of a step."""
    num_graph_sequences: int = 0
    """Size of the largest decode step that is captured as a CUDA graph; read only on a GPU."""
    decode_threads: int | None = None
    """CPU threads of decode steps; None: all."""
    unavailable_proposers: Mapping[Speculate, str] = field(default_factory=dict)
    """Why a proposer cannot draft, by proposer."""
