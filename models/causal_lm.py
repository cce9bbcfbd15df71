"""The base classes of all architectures: a config, and a model that runs whole or as a pipeline stage.

T tokens, S sequences, E hidden channels, V vocabulary, R output rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from conf.errors import UserError, shortened
from kernels.collectives import Link
from models.batch import Batch, CacheKind, KVCache, StateShapes
from models.capabilities import ModelCapabilities
from models.layers.attention import Heads
from models.layers.embedding import Embedding
from models.layers.linear import Linear, tied_embedding
from models.layers.missing import MissingLayer
from models.layers.module import Module
from models.layers.moe import Experts
from models.layers.norm import ResidualStream, StreamWithInputs
from models.layers.tensor_parallel import ShardedChannels
from models.layout import ModelLayout


class CacheContent(NamedTuple):
    """The content of a layer's cache. A layer without heads and states, such as a feed-forward layer, has none."""

    heads: Heads | None
    """Of the keys and values. None: the layer has no attention."""
    states: StateShapes = ()
    window: int | None = None
    """The most tokens that a token attends to, itself included. None: all tokens before it."""

    @property
    def kind(self) -> CacheKind:
        heads, states = self.heads, tuple(state.shape for state in self.states)
        if heads is None:
            return CacheKind(None, states)
        return CacheKind((heads.num_key_value_heads, heads.head_dim, heads.value_head_dim), states)


Stream: TypeAlias = Tensor | ResidualStream | StreamWithInputs
"""Hidden states [T, E] between two layers, in the form that the architecture uses."""


def stream_tensor(stream: Stream) -> Tensor:
    """Return the tensor [T, E] that `CausalLM.received_stream` converts back into a stream."""
    return stream if isinstance(stream, Tensor) else stream.total()


@dataclass(frozen=True)
class ModelShape(ABC):
    """The base class of every architecture's config."""

    vocab_size: int
    num_hidden_layers: int
    tie_word_embeddings: bool
    """Whether the head and the embedding share one weight."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """The maximum number of tokens of a sequence."""

    @property
    def capabilities(self) -> ModelCapabilities:
        return ModelCapabilities()

    @property
    def layer_kinds(self) -> tuple[Hashable, ...]:
        """For each layer a key of its kind, such as whether it is a mixture of experts.

        Layers that are equal in this and in `recurrent_layers` have tensors of the same names and shapes.
        """
        return (False,) * self.num_hidden_layers

    @property
    def recurrent_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it keeps a recurrent state."""
        return (False,) * self.num_hidden_layers

    @property
    def shared_caches(self) -> Mapping[int, int]:
        """By the number of each layer without keys and values of its own, the number of the earlier layer that it reads."""
        return {}

    def with_mtp_layer(self) -> "ModelShape | None":
        """Return the config of the model with the multi-token prediction layer.

        None: the checkpoint has no such layer.
        """
        return None


class CausalLM(Module, ABC):
    """The base class of every architecture's model.

    Modules have the names of the checkpoint's tensors. They are registered in the order of computation: the modules
    before the layers, the list of layers, the modules after it. A layer is called with the stream, `layer_inputs`, the
    batch and its part of the cache.
    """

    config: ModelShape
    layout: ModelLayout = ModelLayout()
    float32_tensors: tuple[str, ...] = ()
    """Suffixes of the parameters that stay float32 in a model of another dtype."""
    missing_layer_reason = "which this model does not have: the adapter belongs to another model"
    """The end of the error for an adapter of a layer that the model does not have."""
    vocabulary: ShardedChannels | None = None
    """The ranks' parts of the vocabulary. None: the head is not sharded."""
    before: Link | None = None
    """The link to the previous pipeline stage. None in the first stage."""
    after: Link | None = None
    """The link to the next pipeline stage. None in the last stage."""
    local_layers: range
    """The numbers of this stage's layers. All other layers are `MissingLayer`."""
    other_caches: dict[int, CacheContent]
    """The content of the unsharded caches of other stages' layers, by number."""

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.config, self.other_caches = config, {}
        self.local_layers = range(config.num_hidden_layers)

    @property
    def prompt_marks(self) -> Sequence[Sequence[int]]:
        """The ids that `prompt_features` searches for, one list per feature.

        The first id of a list that occurs in the prompt is used.
        """
        return ()

    @property
    def of_a_missing_mark(self) -> str:
        """The error for a prompt without one of `prompt_marks`."""
        marks = ", and ".join(" or ".join(map(str, ids)) for ids in self.prompt_marks)
        return f"the prompt lacks tokens that mark its parts: give a prompt with the ids {shortened(marks)}"

    @property
    def num_prompt_features(self) -> int:
        """The number of features that `prompt_features` returns."""
        return len(self.prompt_marks)

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the tensors that a checkpoint may hold but the model does not use."""
        return ()

    @property
    def embedding(self) -> nn.Module:
        """The token embedding, from ids [T] to [T, E]."""
        return self._part(self.layout.embedding)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        layers: nn.ModuleList = self._part(self.layout.layers)  # type: ignore[assignment]
        return list(layers)

    @property
    def head(self) -> nn.Module:
        """The layer from hidden states [R, E] to logits [R, V]."""
        return self._part(self.layout.head)

    @property
    def final_norm(self) -> nn.Module:
        return self._part(self.layout.final_norm)

    def _part(self, path: str) -> nn.Module:
        """Return a module. Unlike get_submodule, it is cheap enough for every step."""
        part: nn.Module = attrgetter(path)(self)
        return part

    @property
    def layer_caches(self) -> list[CacheContent]:
        """The content of each layer's cache. A layer that reads an earlier layer's cache has an empty one."""
        shared = self.config.shared_caches
        contents = [
            (number, self._layer_cache(layer))
            for number, layer in enumerate(self.layers)
            if not isinstance(layer, MissingLayer)
        ]
        return [content._replace(heads=None) if number in shared else content for number, content in contents]

    @property
    def longest_window(self) -> int | None:
        """The longest window of a layer of any stage. None: no layer has a window."""
        windows = [content.window for content in (*self.layer_caches, *self.other_caches.values())]
        return max((window for window in windows if window is not None), default=None)

    def _layer_cache(self, layer: nn.Module) -> CacheContent:
        attention, recurrent = self.attention_module(layer), self.recurrent_module(layer)
        heads, states = getattr(attention, "heads", None), getattr(recurrent, "state_shapes", ())
        return CacheContent(heads, states, getattr(attention, "window", None) or getattr(attention, "chunk", None))

    def recurrent_module(self, layer: nn.Module) -> nn.Module | None:
        """Return the recurrent module of a decoder layer. None: it has none."""
        module = getattr(layer, self.layout.recurrent, None) if self.layout.recurrent else None
        return module if hasattr(module, "state_shapes") else None

    def attention_module(self, layer: nn.Module) -> nn.Module | None:
        """Return the attention module of a decoder layer. None: it has none."""
        module: nn.Module | None = layer
        for name in self.layout.attention.split("."):
            module = getattr(module, name, None)
        return module if isinstance(getattr(module, "heads", None), Heads) else None

    @property
    def attention_heads(self) -> list[Heads]:
        """The attention heads of each attention layer of this stage."""
        return [content.heads for content in self.layer_caches if content.heads is not None]

    def step_weight_bytes(self, num_sequences: int) -> float:
        """Return the bytes of weights that a decode step reads.

        Embeddings count only if they are the head's weight, because a step reads few rows of them. Experts count by the
        expected fraction that the tokens choose if all experts are equally likely, which is exact for one sequence.
        """
        skipped: float = sum(map(_num_bytes, unread_embeddings(self)))
        for module in self.modules():
            if isinstance(module, Experts):
                skipped += _num_bytes(module) * (1 - module.active_share(num_sequences))
        return _num_bytes(self) - skipped

    def prompt_features(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return the first position of each prompt mark. Every step needs the result, as `Batch.prompt_features`.

        Raises UserError for a prompt that lacks a mark.
        """
        mark_ids = [next((id for id in ids if id in token_ids), None) for ids in self.prompt_marks]
        if None in mark_ids:
            raise UserError(self.of_a_missing_mark)
        return tuple(token_ids.index(id) for id in mark_ids if id is not None)

    @property
    def stream_width(self) -> int:
        """The channels that a stage sends to the next stage."""
        linears = (module for module in self.layers[0].named_modules() if isinstance(module[1], Linear))
        outputs: int = next(
            layer.shape[0] for name, layer in linears if name.rpartition(".")[2] in self.layout.row_parallel
        )
        return outputs

    def embed(self, batch: Batch) -> Stream:
        """Return the input of the first layer [T, E]."""
        stream: Stream = self.embedding(batch.token_ids)
        return stream

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the arguments that every layer takes between the stream and the batch, such as angles or slopes.

        dtype: the model's dtype.
        """
        return ()

    def run_layers(self, stream: Stream, batch: Batch, cache: KVCache, numbers: range) -> Stream:
        """Run the layers of these numbers on the stream, and write their keys and values into the cache.

        `cache` holds the caches of these layers only; for a layer that reads the cache of an earlier layer that is not
        one of them, it holds that cache. After the model's last layer, the stream has the batch's output rows [R, E].
        """
        inputs, last = self.layer_inputs(batch, cache.dtype), self.config.num_hidden_layers - 1
        layers, shared = self.layers[numbers.start : numbers.stop], self.config.shared_caches
        batches = batch, batch.select_window_blocks() if cache.num_window_blocks else batch
        has_window_blocks = cache.has_window_blocks or [False] * len(layers)
        for number, layer, layer_cache, is_windowed in zip(
            numbers, layers, cache.layers, has_window_blocks, strict=True
        ):
            layer_batch = batches[is_windowed]
            if number == last:
                layer_batch = layer_batch.select_output_rows()
            source = shared.get(number)
            if source is not None and source in numbers:
                layer_cache = cache.layers[source - numbers.start]
            stream = layer(stream, *inputs, layer_batch, layer_cache)
        return stream

    def finish(self, stream: Any) -> Tensor:
        """Return the normed hidden states [R, E] of the stream after the last layer."""
        hidden: Tensor = self.final_norm(stream)
        return hidden

    def received_stream(self, x: Tensor) -> Stream:
        """Convert the tensor [T, E] that the previous stage sent into a stream."""
        return x

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Return the normed hidden states [R, E] of the output rows, and write the keys and values into the cache.

        A stage that is not the last sends its total stream [T, E] to the next stage, and returns it.
        """
        if self.before is None:
            stream = self.embed(batch)
        else:
            stream = self.received_stream(
                self.before.receive(batch.shape.num_tokens, cache.dtype, batch.numbers.device)
            )
        stream = self.run_layers(stream, batch, cache, self.local_layers)
        if self.after is None:
            return self.finish(stream)
        x = stream_tensor(stream)
        self.after.send(x)
        return x

    def predict_ahead(self, hidden: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """Run the multi-token prediction layer: return normed hidden states [R, E] of the output rows.

        Their logits predict the token after each of the batch's tokens. `batch` holds each token at the position of the
        token before it. `hidden` [T, E] holds the normed hidden states of these earlier tokens, from the model or from
        this method. `cache` is the model's whole cache. Only for a model with the capability `predicts_ahead`.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch | None = None) -> Tensor:
        """Return the logits [R, V] of normed hidden states [R, E].

        batch: the batch whose output rows these are; None: the rows belong to no batch.

        With tensor parallelism, only rank 0 of the last stage gets all logits. Its other ranks return the logits of
        their part of the vocabulary. A stage without the head returns none.
        """
        if self.after is not None:
            return hidden.new_empty(len(hidden), 0)
        logits: Tensor = self.head(hidden, batch)
        return logits if self.vocabulary is None else self.vocabulary.gather_first(logits)


def unread_embeddings(model: CausalLM) -> list[Embedding]:
    """Return the embeddings of which a step reads few rows: all but the embedding of a tied head."""
    embeddings = (module for module in model.modules() if isinstance(module, Embedding))
    return [embedding for embedding in embeddings if embedding is not tied_embedding(model.head)]


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
