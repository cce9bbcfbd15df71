"""The base of all architectures: a config, and a model that runs whole or in parts.

T tokens, S sequences, E hidden channels, V vocabulary, R output rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from conf.errors import UserError, shortened
from kernels.collectives import Link
from models.batch import Batch, KVCache
from models.layers.attention import Heads
from models.layers.linear import tied_weight
from models.layers.missing import MissingLayer
from models.layers.module import Module
from models.layers.moe import Experts
from models.layers.norm import ResidualStream
from models.layers.tensor_parallel import Pieces
from models.layout import ModelLayout

Stream: TypeAlias = Tensor | ResidualStream
"""Hidden states [T, E] between two layers, as an architecture passes them on."""


@dataclass(frozen=True)
class ModelShape(ABC):
    """The base of every architecture's config."""

    vocab_size: int
    num_hidden_layers: int
    tie_word_embeddings: bool
    """Whether the head's weight is the embedding's."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """The largest number of tokens of a sequence."""

    @property
    def keys_depend_on_length(self) -> bool:
        """Whether a token's key is another one in a longer prompt, so that prompts cannot share their beginnings."""
        return False

    @property
    def long_rope_threshold(self) -> int | None:
        """The length past which all keys of a text are computed otherwise, so that a sequence that grows past it is computed again.

        None: there is no such length.
        """
        return None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether a prompt's tokens see later ones, so that it must be computed in one step and cannot share its beginning."""
        return False

    @property
    def has_windows(self) -> bool:
        """Whether a layer sees a window of the latest tokens only."""
        return False

    @property
    def prefix_stops_scaling(self) -> bool:
        """Whether keys no longer depend on the prompt's length after a soft prefix of keys and values."""
        return False

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        """For each layer what tells whether its tensors have the names and shapes of another's: whether it is a mixture of experts."""
        return (False,) * self.num_hidden_layers

    @property
    def predicts_ahead(self) -> bool:
        """Whether the model has the layer of `CausalLM.predict_ahead`, whose keys and values come last in the cache."""
        return False

    def predicting_ahead(self) -> "ModelShape | None":
        """Return the shape of the model with that layer, or None where the checkpoint has none."""
        return None


class CausalLM(Module, ABC):
    """The base of every architecture's model.

    Modules have the names that their tensors have in the checkpoint. They are registered in the order of the computation: what comes before
    the list of layers, the layers, what comes after. A layer is called with a stream, `layer_inputs`, a batch and its part of the cache.
    """

    config: ModelShape
    layout: ModelLayout = ModelLayout()
    float32_tensors: tuple[str, ...] = ()
    """Ends of the names of parameters that stay float32 in a model of another dtype."""
    of_a_missing_layer = "which this model does not have: the adapter belongs to another one"
    """What is said of an adapter of a layer that is not there."""
    vocabulary: Pieces | None = None
    """The vocabulary, where each rank has the logits of some words."""
    before: Link | None = None
    """Where the stream comes from, in a stage that is not the first."""
    after: Link | None = None
    """Where the stream goes, in a stage that is not the last."""
    own_layers: range
    """The numbers of the layers that this stage has: all, or some of a divided model, whose others are `MissingLayer`."""

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.config = config
        self.own_layers = range(config.num_hidden_layers)

    @property
    def prompt_marks(self) -> Sequence[Sequence[int]]:
        """The ids that `prompt_features` looks for: a list for each feature, whose first id that a prompt has is its mark."""
        return ()

    @property
    def of_a_missing_mark(self) -> str:
        """The error for a prompt that lacks one of `prompt_marks`."""
        ids = ", and ".join(" or ".join(map(str, each)) for each in self.prompt_marks)
        return f"the prompt lacks tokens that the model finds its parts by: give one with the ids {shortened(ids)}"

    @property
    def num_prompt_features(self) -> int:
        """The length of what `prompt_features` returns."""
        return len(self.prompt_marks)

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """Beginnings of the names of tensors that a checkpoint may hold beside this model's own."""
        return ()

    @property
    def embedding(self) -> nn.Module:
        """The embedding of tokens, from ids [T] to [T, E]."""
        return self._part(self.layout.embedding)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in their order."""
        layers: nn.ModuleList = self._part(self.layout.layers)  # type: ignore[assignment]
        return list(layers)

    @property
    def head(self) -> nn.Module:
        """The layer that turns hidden states [R, E] into logits [R, V]."""
        return self._part(self.layout.head)

    @property
    def final_norm(self) -> nn.Module:
        """The norm of hidden states after the last decoder layer."""
        return self._part(self.layout.final_norm)

    def _part(self, path: str) -> nn.Module:
        """Return the submodule at a path. Every step asks for some, and torch's get_submodule makes three times as many calls."""
        part: nn.Module = attrgetter(path)(self)
        return part

    @property
    def attention_heads(self) -> list[Heads]:
        """The heads of each own layer's attention, by which its keys and values are stored."""
        own = (layer for layer in self.layers if not isinstance(layer, MissingLayer))
        return [layer.get_submodule(self.layout.attention).heads for layer in own]  # type: ignore[misc]

    def step_weight_bytes(self, num_sequences: int) -> float:
        """Return the bytes of weights that a decode step reads.

        Embeddings that are no head do not count: a step reads a few of their rows. Of a mixture's experts those count that tokens are
        expected to choose if all are equally likely; for one sequence the number is exact.
        """
        embeddings = [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]
        skipped: float = sum(weight.nbytes for weight in embeddings if weight is not tied_weight(self.head))
        for module in self.modules():
            if isinstance(module, Experts):
                skipped += _num_bytes(module) * (1 - module.active_share(num_sequences))
        return _num_bytes(self) - skipped

    def prompt_features(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return where each of the prompt's marks stands first. The model needs this in every step, as `Batch.prompt_features`.

        Raises UserError for a prompt that lacks a mark.
        """
        found = [next((id for id in ids if id in token_ids), None) for ids in self.prompt_marks]
        if None in found:
            raise UserError(self.of_a_missing_mark)
        return tuple(token_ids.index(id) for id in found if id is not None)

    def embed(self, batch: Batch) -> Stream:
        """Return what enters the first layer [T, E]."""
        stream: Stream = self.embedding(batch.token_ids)
        return stream

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return what every layer gets between the stream and the batch: angles, slopes. `dtype` is the model's."""
        return ()

    def run_layers(self, stream: Stream, batch: Batch, cache: KVCache, numbers: range) -> Stream:
        """Return the stream after the layers of these numbers, from the stream before them; write their keys and values into the cache.

        `cache` has the caches of these layers alone. After the model's last layer the stream has the batch's output rows [R, E].
        """
        inputs, last = self.layer_inputs(batch, cache.dtype), self.config.num_hidden_layers - 1
        layers = self.layers[numbers.start : numbers.stop]
        for number, layer, layer_cache in zip(numbers, layers, cache.layers, strict=True):
            layer_batch = batch.of_output_rows() if number == last else batch
            stream = layer(stream, *inputs, layer_batch, layer_cache)
        return stream

    def finish(self, stream: Any) -> Tensor:
        """Return normed hidden states [R, E] from the stream after the last layer."""
        hidden: Tensor = self.final_norm(stream)
        return hidden

    def received(self, x: Tensor) -> Stream:
        """Return the stream [T, E] that the stage before gave as its sum."""
        return x

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Return the normed hidden states [R, E] of the batch's output rows; write the batch's keys and values into the cache.

        A stage that is not the last sends the next one the sum [T, E] of its stream, and returns that.
        """
        if self.before is None:
            stream = self.embed(batch)
        else:
            stream = self.received(self.before.receive(batch.shape.num_tokens, cache.dtype, batch.numbers.device))
        stream = self.run_layers(stream, batch, cache, self.own_layers)
        if self.after is None:
            return self.finish(stream)
        x = stream.total() if isinstance(stream, ResidualStream) else stream
        self.after.send(x)
        return x

    def predict_ahead(self, hidden: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """Return normed hidden states [R, E] of the batch's output rows, whose logits are of the tokens after the batch's.

        `batch` has tokens at the positions of those before them, `hidden` [T, E] the normed hidden states of the latter: the model's,
        or what this returned. `cache` is the model's whole cache. Only for a model whose config has `predicts_ahead`.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch | None = None) -> Tensor:
        """Return logits [R, V] of normed hidden states [R, E], which are the output rows of `batch`. None: rows of no batch.

        Of a divided model only a stage's first rank has all; the others have those of their words, and a stage without the head none.
        """
        if self.after is not None:
            return hidden.new_empty(len(hidden), 0)
        logits: Tensor = self.head(hidden, batch)
        return logits if self.vocabulary is None else self.vocabulary.joined_by_first(logits)


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
