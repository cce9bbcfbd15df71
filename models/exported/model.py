"""A model that runs an exported graph. The engine treats it like any other model.

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
from kernels.quantize_rows import Activations
from models.batch import Batch, KVCache
from models.causal_lm import CacheContent, CausalLM
from models.exported.description import ADAPTED_GRAPH, GRAPH, REMEDY, WEIGHTS, Description
from models.exported.graph import STREAM, DamagedGraphError, Graph, graph_inputs
from models.exported.reader import build_graph, read_graph
from models.heads import NoHead
from models.layers.lora_target import LoRATarget
from models.layers.missing import MissingLayer
from models.layers.module import Module
from models.layers.named_parts import register


class GraphEmbedding(Module):
    """The graph's token embedding as a module, so that a soft prefix can replace its output."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.embedding_dim = channels

    def forward(self, function: Callable[..., Tensor], *arguments: Any, **keywords: Any) -> Tensor:
        """Return the vectors [T, E] of tokens: the result of the graph's embedding function."""
        return function(*arguments, **keywords)


class ExportedLM(CausalLM):
    """An exported model, or a rank's part of it.

    It exposes only the LoRA target layers, so it cannot be calibrated.
    """

    missing_layer_reason = (
        "which rows of an exported model cannot adapt: merge the adapter by task=convert convert.lora, "
        "and export the result"
    )
    graph: Graph
    """The graph of steps without adapters."""
    quantize_rows: Callable[[Tensor, int], Activations] | None = None
    """Quantises the rows that integer weights multiply, as in `build_graph`. Set it before a graph is read."""

    def __init__(
        self,
        description: Description,
        folder: Path,
        has_head: bool = True,
        group: Group | None = None,
        neighbours: Neighbours = NO_NEIGHBOURS,
    ) -> None:
        """`folder`: the folder of the described files. `has_head`: false returns the hidden states as logits.

        `group` and `neighbours`: of the rank, as in `shard_model`.
        """
        super().__init__(description.shape)
        self._group = group
        self._weights = dict[str, Tensor]()
        self._has_head = has_head
        self._embedding = GraphEmbedding(description.embedding_dim)
        self.description, self.folder = description, folder
        self.kv_formats: list[tuple[KVFormat, KVFormat]] = []
        """The cache formats of each attention layer's keys and values, set by `load`."""
        self._linears = {name: LoRATarget(shape) for name, shape in description.linears.items()}
        names = [*self._linears]
        try:
            for name in names if has_head else filter(description.head.__ne__, names):
                register(self, name, self._linears[name])
            self._apply_shard(neighbours)
        except (KeyError, ValueError, AttributeError) as error:
            self._raise_damaged(error)

    def _apply_shard(self, neighbours: Neighbours) -> None:
        part = self.description.part
        if part is None:
            return
        self.local_layers = part.local_layers
        first = self.layer_caches[0]  # export.json has only the windows of other stages
        windows = {n: window for n, window in enumerate(self.description.windows) if n not in part.local_layers}
        self.other_caches = {number: first._replace(window=window) for number, window in windows.items()}
        self.before, self.after = (None if pair is None else Link(pair, part.width) for pair in neighbours)
        for name, outputs in part.outputs.items():
            self._linears[name].keep(outputs)
        for name in part.absent:
            register(self, name, MissingLayer())

    def load(self) -> None:
        """Map the weights and read the graph. Raises UserError for missing, damaged or hostile files."""
        try:
            with safe_open(self.folder / WEIGHTS, framework="pt") as file:
                names = dict.fromkeys(self.description.weights + self.description.adapted_weights)
                self._weights = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.folder / WEIGHTS} is damaged ({error}): {REMEDY}") from error
        try:
            cache = self.description.empty_cache(self._weights)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self._raise_damaged(error)
        graph = self._build(GRAPH, self.description.weights)
        self.kv_formats = [(keys.format, values.format) for keys, values in cache.attention_layers]
        try:
            self.graph = graph
            for number, name in enumerate(self.description.weights):
                if name not in self.description.constants:
                    self.register_buffer(f"weight_{number}", self._weights[name])
        except (KeyError, TypeError) as error:  # a linear layer has the same name
            self._raise_damaged(error)

    @cached_property
    def adapted_graph(self) -> Graph:
        """The graph of steps with adapters, read on first use. Raises UserError as `load` does."""
        return self._build(ADAPTED_GRAPH, self.description.adapted_weights, [*self._linears.values()])

    def _build(self, file: str, names: list[str], adapted: list[LoRATarget] | None = None) -> Graph:
        """Read a graph. `adapted`: the layers whose adapters are its inputs; None: a graph without adapters."""
        weights, part = {name: self._weights[name] for name in names}, self.description.part
        fields = graph_inputs(self, adapted is not None)
        fields += () if part is None or part.parallel_layout.stage == 0 else (STREAM,)
        try:
            cache = self.description.empty_cache(self._weights)
            graph = read_graph(self.folder / file, self.description.sha256[file])
            windows, adapted = self.description.local_windows, adapted or []
            return build_graph(
                graph, fields, cache, windows, weights, self._embedding, adapted, self._group, self.quantize_rows
            )
        except DamagedGraphError as error:
            raise UserError(f"{self.folder / file} is damaged ({error}): {REMEDY}") from error

    @property
    def prompt_marks(self) -> Sequence[Sequence[int]]:
        return self.description.prompt_marks

    @property
    def layer_caches(self) -> list[CacheContent]:
        return self.description.layer_caches

    @property
    def embedding(self) -> nn.Module:
        return self._embedding

    @property
    def head(self) -> nn.Module:
        """A head that returns its input. The real head is in the graph."""
        return NoHead(self.description.hidden_size)

    def step_weight_bytes(self, num_sequences: int) -> float:
        active = (
            mixture.num_bytes * (1 - (1 - mixture.num_experts_per_tok / mixture.num_experts) ** num_sequences)
            for mixture in self.description.mixtures
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
                    raise DamagedGraphError("its output for the next stage has another shape or dtype")
                self.after.send(hidden)
            return hidden
        except DamagedGraphError as error:
            self._raise_damaged(error)

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
            self._raise_damaged(error)

    def _raise_damaged(self, error: Exception) -> NoReturn:
        reason = " ".join(str(error).split())
        raise UserError(f"{self.folder} is damaged ({reason}): {REMEDY}") from error
