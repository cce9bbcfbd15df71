"""Architectures by the `model_type` of config.json."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from conf.errors import UserError
from models import llama
from models.batch import Batch, KVCache
from models.config import ConfigReader


class ModelShape(Protocol):
    """What the engine needs to know of any architecture's config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def keys_depend_on_length(self) -> bool:
        """Whether a token's key is another one in a longer prompt, so that prompts cannot share their beginnings."""


class CausalLM(Protocol):
    """What the engine needs of any architecture's model."""

    config: ModelShape

    @property
    def step_weight_bytes(self) -> int: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def __call__(self, batch: Batch, cache: KVCache) -> Tensor:
        """Hidden states [R, E] of the batch's output rows; fills the cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] from hidden states [R, E]."""


@dataclass(frozen=True)
class Architecture:
    read_config: Callable[[ConfigReader], Any]
    build: Callable[[Any], nn.Module]
    ignored_tensors: tuple[str, ...] = ()
    """Suffixes of tensors that some checkpoints carry and this architecture computes itself."""


ARCHITECTURES = {
    "llama": Architecture(llama.read_config, llama.Llama, ignored_tensors=("rotary_emb.inv_freq",)),
}


def find_architecture(config: ConfigReader) -> Architecture:
    """Raises UserError, with the names that exist, for a model_type that is not one of them."""
    model_type = config.require("model_type", str)
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"config.json: model_type={model_type!r} is not supported: only {', '.join(sorted(ARCHITECTURES))}"
        )
    config.expect("quantization_config", (None,), None)
    return ARCHITECTURES[model_type]
