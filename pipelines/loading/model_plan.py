"""The result of stage 2 of loading an engine: a model without weights, and what stages 3 to 5 need to load it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from conf.quantization import KVCacheFormat, QuantConfig
from conf.schema import ModelConfig
from models.causal_lm import CausalLM
from models.formats.base import WeightFile
from models.sharding import ParallelLayout, Shard
from pipelines.loading.model_source import ModelSource


@dataclass(frozen=True)
class ModelPlan:
    """A model that can be loaded, and its target device and dtype."""

    source: ModelSource
    model: CausalLM
    """On the meta device."""
    files: list[WeightFile]
    """The checkpoint's weight files; none with model.weights=random."""
    ignored_tensors: tuple[str, ...]
    """Suffixes of tensor names in the files that are not parameters."""
    dtype: torch.dtype
    device: torch.device
    options: ModelConfig
    """The options with which the model was opened."""
    quant: QuantConfig
    """The options of quantisation. The options for KV cache and activations also apply to a quantised checkpoint."""
    packed: bool
    """Whether layers hold their weights in the kernels' packed form, and decode steps are captured."""
    static_cache: KVCacheFormat | None
    """The format of the KV cache, if the files contain its static scales; else None."""
    max_layer_values: int
    """Largest number of live values per token around a linear layer (`memory.max_layer_values`); 0 if exported."""
    parallel_layout: ParallelLayout = ParallelLayout()
    """The rank and layout of this shard; by default the whole model."""
    whole_files: tuple[WeightFile, ...] = ()
    """The checkpoint's whole files, if `files` holds sharded views of them."""
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """The shard of each sharded tensor, by name. Other tensors are replicated."""
