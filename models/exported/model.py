"""A model that is its graph: the engine runs it as any other.

T tokens, E hidden channels, V vocabulary, R output rows.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from conf.errors import UserError
from kernels.collectives import NO_NEIGHBOURS, Group, Link, Neighbours
from kernels.kv_format import KVFormat
from kernels.quantize_rows import Rows
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM
from models.exported.description import ADAPTED_GRAPH, GRAPH, REMEDY, WEIGHTS, Description
from models.exported.graph import ADAPTED_INPUTS, INPUTS, STREAM, DamagedGraphError, Graph
from models.exported.reader import build_graph, read_graph
from models.exported.shard import ExportedShard
from models.heads import NoHead
from models.layers.attention import Heads
from models.layers.lora_target import LoRATarget
from models.layers.missing import MissingLayer
from models.layers.module import Module
from models.layers.named_parts import register


class GraphEmbedding(Module):
    """The graph's embedding of tokens, a module as that of other models: a soft prefix stands in for what it gives."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.embedding_dim = channels

    def forward(self, function: Callable[..., Tensor], **arguments: Any) -> Tensor:
        """Return the vectors [T, E] of tokens, which are what the graph's function gives."""
        return function(**arguments)


class ExportedLM(CausalLM):
    """The model of an artefact, or a rank's part. Of its layers there is what rows adapt alone: no calibration."""

    of_a_missing_layer = (
        "which rows of an exported model cannot adapt: merge it by task=convert convert.lora, and export that"
    )
    graph: Graph
    """That of steps without adapters."""
    quantized: Callable[[Tensor, int], Rows] | None = None
    """What makes codes of the rows that weights of integers multiply, as for `build_graph`. It is read when a graph is."""

    def __init__(
        self,
        description: Description,
        folder: Path,
        has_head: bool = True,
        group: Group | None = None,
        neighbours: Neighbours = NO_NEIGHBOURS,
    ) -> None:
        """`folder`: of the files that are described. `has_head`: whether logits are wanted; without, they are the hidden states.

        `group` and `neighbours`: as for `divide`, of the rank whose part it is.
        """
        super().__init__(description.shape)
        self._group = group
        self._weights = dict[str, Tensor]()
        self._has_head = has_head
        self._embedding = GraphEmbedding(description.embedding_dim)
        self.description, self.folder = description, folder
        self.kv_formats: list[tuple[KVFormat, KVFormat]] = []
        """Of each layer's keys and values, after `load`."""
        self._linears = {name: LoRATarget(shape) for name, shape in description.linears.items()}
        part, names = description.part, [*self._linears]
        try:
            for name in names if has_head else filter(description.head.__ne__, names):
                register(self, name, self._linears[name])
            if part is not None:
                self._become(part, neighbours)
        except (KeyError, ValueError, AttributeError) as error:
            self._refuse(error)

    def _become(self, part: ExportedShard, neighbours: Neighbours) -> None:
        """Be a rank's part."""
        self.own_layers = part.own_layers
        self.before, self.after = (None if pair is None else Link(pair, part.width) for pair in neighbours)
        for name, outputs in part.outputs.items():
            self._linears[name].keep(outputs)
        for name in part.absent:
            register(self, name, MissingLayer())

    def load(self) -> None:
        """Map the weights and read the graph. Raises UserError for files that are missing, damaged or hostile."""
        try:
            with safe_open(self.folder / WEIGHTS, framework="pt") as file:
                names = dict.fromkeys(self.description.weights + self.description.adapted_weights)
                self._weights = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.folder / WEIGHTS} is damaged ({error}): {REMEDY}") from error
        try:
            sides = self.description.vectors(self._weights)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self._refuse(error)
        graph = self._read(GRAPH, INPUTS, self.description.weights, [])
        formats = [side.format for side in sides]
        self.kv_formats = list(zip(formats[::2], formats[1::2], strict=True))
        try:
            self.graph = graph
            for number, name in enumerate(self.description.weights):
                if name not in self.description.constants:
                    self.register_buffer(f"weight_{number}", self._weights[name])
        except (KeyError, TypeError) as error:  # a linear layer has this name
            self._refuse(error)

    @cached_property
    def adapted_graph(self) -> Graph:
        """That of steps with adapters, read when it is needed. Raises UserError as `load` does."""
        return self._read(ADAPTED_GRAPH, ADAPTED_INPUTS, self.description.adapted_weights, [*self._linears.values()])

    def _read(self, file: str, fields: tuple[str, ...], names: list[str], adapted: list[LoRATarget]) -> Graph:
        weights, part = {name: self._weights[name] for name in names}, self.description.part
        fields += () if part is None or part.parallel_layout.stage == 0 else (STREAM,)
        try:
            sides = self.description.vectors(self._weights)
            graph = read_graph(self.folder / file, self.description.sha256[file])
            return build_graph(graph, fields, sides, weights, self._embedding, adapted, self._group, self.quantized)
        except DamagedGraphError as error:
            raise UserError(f"{self.folder / file} is damaged ({error}): {REMEDY}") from error

    @property
    def prompt_marks(self) -> Sequence[Sequence[int]]:
        return self.description.prompt_marks

    @property
    def attention_heads(self) -> list[Heads]:
        return self.description.heads

    @property
    def embedding(self) -> nn.Module:
        return self._embedding

    @property
    def head(self) -> nn.Module:
        """The head of a model without one; the other is in the graph."""
        return NoHead(self.description.hidden_size)

    def step_weight_bytes(self, num_sequences: int) -> float:
        active = (
            each.num_bytes * (1 - (1 - each.num_experts_per_tok / each.num_experts) ** num_sequences)
            for each in self.description.mixtures
        )
        return self.description.step_bytes + sum(active)

    def forward(self, batch: Batch, cache: KVCache, x: Tensor | None = None) -> Tensor:
        graph = self.adapted_graph if batch.shape.num_adapted else self.graph
        stream = None
        if self.before is not None:
            stream = self.before.receive(batch.shape.num_tokens, cache.dtype, batch.numbers.device)
        try:
            hidden = graph.compute_hidden(batch, cache, stream)
            if self.after is not None:
                if hidden.shape != (batch.shape.num_tokens, self.after.width) or hidden.dtype != cache.dtype:
                    raise DamagedGraphError("what it gives to the next stage has another form")
                self.after.send(hidden)
            return hidden
        except DamagedGraphError as error:
            self._refuse(error)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch | None = None) -> Tensor:
        is_adapted = batch is not None and batch.shape.num_adapted > 0
        if self.after is not None:
            return hidden.new_empty(len(hidden), 0)
        try:
            if not self._has_head:
                return hidden
            return (self.adapted_graph if is_adapted else self.graph).compute_logits(hidden, batch)
        except DamagedGraphError as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        reason = " ".join(str(error).split())
        raise UserError(f"{self.folder} is damaged ({reason}): {REMEDY}") from error
