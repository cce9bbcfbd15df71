"""What the engine needs to know of any architecture: its shape, and a model that gives hidden states and logits.

T tokens, S sequences, E hidden channels, V vocabulary, R output rows.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.batch import Batch, KVCache
from models.layers.linear import TiedHead
from models.layers.moe import Experts


@dataclass(frozen=True)
class ModelShape(ABC):
    """The base of every architecture's config."""

    vocab_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    """Channels of a key head."""

    @property
    def value_head_dim(self) -> int:
        """Channels of a value head; 0 where values are not kept beside the keys."""
        return self.head_dim

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Most tokens of a sequence."""

    @property
    def keys_depend_on_length(self) -> bool:
        """Whether a token's key is another one in a longer prompt, so that prompts cannot share their beginnings."""
        return False

    @property
    def key_border(self) -> int | None:
        """The length past which every key of a text is another one, so that a sequence that grows past it must be computed again.

        None: there is no such length.
        """
        return None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether a prompt's tokens see later ones, so that it must be computed in one step and cannot share its beginning."""
        return False


class CausalLM(nn.Module, ABC):
    """The base of every architecture's model. Modules are named as the checkpoint's tensors are, so no map of names is needed, and are
    registered in the order of the computation: what comes before the list of layers, the layers, what comes after."""

    config: ModelShape
    float32_tensors: tuple[str, ...] = ()
    """Ends of the names of parameters that stay float32 in a model of another dtype."""
    row_parallel: tuple[str, ...] = ("o_proj", "down_proj")
    """Linear layers that write into the residual stream: tensor parallelism divides their inputs, of all others the outputs."""
    attention: str = "self_attn"
    """A layer's module that keeps keys and values."""
    replicated: tuple[str, ...] = ()
    """Linear layers and embeddings that every rank of tensor parallelism has whole: routers, tables of positions, latents."""

    num_prompt_marks: int = 0
    """How many numbers `mark_prompt` gives."""

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """Beginnings of the names of tensors that a checkpoint may hold beside this model's own."""
        return ()

    @property
    def head(self) -> nn.Module:
        """What turns hidden states [R, E] into logits [R, V]."""
        return self.get_submodule("lm_head")

    def step_weight_bytes(self, num_sequences: int) -> float:
        """Bytes of weights that a decode step reads: all but embeddings that are no head, of which it reads a few rows, and but experts
        that no token goes to, whose number is the expected one of an even choice (for one sequence it is exact)."""
        tied = self.head.weight if isinstance(self.head, TiedHead) else None
        embeddings = [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]
        skipped: float = sum(weight.nbytes for weight in embeddings if weight is not tied)
        for module in self.modules():
            if isinstance(module, Experts):
                skipped += _num_bytes(module) * (1 - module.active_share(num_sequences))
        return _num_bytes(self) - skipped

    def mark_prompt(self, token_ids: list[int]) -> tuple[int, ...]:
        """What the model wants to know of each sequence's prompt in every step: numbers, as many for every prompt (`prompt_marks`)."""
        return ()

    @abstractmethod
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Hidden states [R, E] of the batch's output rows, normed; writes the batch's keys and values into the cache."""

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] from hidden states [R, E]."""
        return self.head(hidden)  # type: ignore[no-any-return]


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
