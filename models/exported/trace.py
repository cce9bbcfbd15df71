"""Trace a model's step into a program of Quintet's operators. Its inputs are the batch, the cache and the weights.

T tokens, S sequences, M blocks in the longest block table, R output rows, N blocks of B slots.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_structure

from kernels.collectives import Alone, Link
from kernels.kv_format import PagedVectors
from kernels.lora import AdapterTable
from models.batch import (
    WINDOW_FIELDS,
    AnyCache,
    Batch,
    BatchShape,
    KVCache,
    LayerState,
    attention_cache,
    join_cache,
    layer_states,
)
from models.causal_lm import CausalLM
from models.exported.graph import ADAPTERS, STATES, STREAM, graph_inputs
from models.layers.lora_target import LoRATarget

TRACED = BatchShape(num_tokens=7, num_sequences=3, table_width=2, num_prompt_features=0, num_outputs=5)
"""The sizes of the traced step.

All sizes are above 1 and distinct, because torch treats 0, 1 and equal sizes as constants.
"""
NUM_BLOCKS, BLOCK_SIZE = 6, 16
NUM_SLOTS, RANK = 9, 11
NUM_STATE_SLOTS = 13


@dataclass(frozen=True)
class Traced:
    """A program with the arguments (fields, stored, weights, tables).

    It returns hidden states [R, E] and logits [R, V].
    In a later pipeline stage, the fields include the stream [T, E]. A stage that is not the last returns only the
    stream.
    """

    program: ExportedProgram
    weights: dict[str, Tensor]
    """In the order of the program's inputs."""


class StageLink(Link):
    """The link to another stage in a graph. Received tensors are inputs of the graph, sent tensors are outputs."""

    def __init__(self, width: int, x: Tensor | None = None) -> None:
        super().__init__(Alone(), width)
        self._x = x

    def send(self, x: Tensor) -> None:
        """Do nothing: the step returns x."""

    def receive(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert self._x is not None
        return self._x


class FieldsBatch(Batch):
    """A batch whose fields are separate tensors.

    The last layer always selects the output rows, even if they are all rows.
    """

    def __init__(self, fields: Mapping[str, Tensor], only_outputs_attend: bool = False) -> None:
        # The stream and the token ids have as many rows, but torch learns this only at the end of a trace. Therefore a
        # later stage uses the stream's number of rows.
        tokens, tables = fields.get(STREAM, fields["token_ids"]).shape[0], fields["block_tables"].shape
        features, outputs = fields["prompt_features"].shape[1], fields["output_rows"].shape[0]
        adapted = tokens if ADAPTERS in fields else 0
        states, windowed = (tables[0] if name in fields else 0 for name in (STATES[0], "window_tables"))
        shape = BatchShape(tokens, tables[0], tables[1], features, outputs, adapted, states, windowed)
        super().__init__(fields["token_ids"], shape, only_outputs_attend)
        self._fields = fields
        vars(self).update(fields)

    def select_output_rows(self) -> Batch:
        return FieldsBatch(self._fields, only_outputs_attend=True)

    def select_window_blocks(self) -> Batch:
        own = {field: self._fields[name] for name, field in WINDOW_FIELDS.items() if name in self._fields}
        return FieldsBatch({**self._fields, **own}, self._only_outputs_attend)

    def adapter_slots_of(self, num_rows: int) -> Tensor | None:
        if not self.shape.num_adapted:
            return None
        are_all = statically_known_true(num_rows == self.shape.num_tokens)  # creates no guard on the sizes
        return self.adapter_slots if are_all else self.adapter_slots[self.output_rows]


class Step(nn.Module):
    """Computes a model's hidden states and logits.

    The tensors of the cache and of the adapters are inputs; the cache formats are constants.
    """

    def __init__(self, model: CausalLM, cache: KVCache, adapted: Sequence[LoRATarget]) -> None:
        super().__init__()
        self.model, self.cache, self._adapted = model, cache, tuple(adapted)

    def forward(
        self, fields: dict[str, Tensor], stored: list[Tensor], tables: list[list[Tensor]]
    ) -> tuple[Tensor, ...]:
        model, links = self.model, (self.model.before, self.model.after)
        num_tensors = len(self.cache.tensors)
        tensors, states = iter(stored[:num_tensors]), iter(stored[num_tensors:])
        layers = [_with_inputs(layer, tensors, states) for layer in self.cache.layers]
        try:
            for layer, table in zip(self._adapted, tables, strict=True):
                layer.adapters = AdapterTable(*table)
            before, after = links
            model.before = None if before is None else StageLink(before.width, fields[STREAM])
            model.after = None if after is None else StageLink(after.width)
            hidden = model(FieldsBatch(fields), replace(self.cache, layers=layers))
            return (hidden, model.logits(hidden, FieldsBatch(fields))) if after is None else (hidden,)
        finally:
            model.before, model.after = links
            for layer in self._adapted:
                layer.adapters = None


def _empty_table(layer: LoRATarget, dtype: torch.dtype) -> AdapterTable:
    outputs, inputs = layer.shape
    return AdapterTable.empty(NUM_SLOTS, RANK, inputs, outputs, dtype, torch.device("cpu"))


def _with_inputs(layer: AnyCache, tensors: Iterator[Tensor], states: Iterator[Tensor]) -> AnyCache:
    layer_state, attention = LayerState(tuple(islice(states, len(layer_states(layer))))), attention_cache(layer)
    if attention is None:
        return layer_state
    keys, values = attention
    return join_cache((_with_tensors(keys, tensors), _with_tensors(values, tensors)), layer_state)


def _with_tensors(vectors: PagedVectors, tensors: Iterator[Tensor]) -> PagedVectors:
    return replace(vectors, tensors=tuple(islice(tensors, len(vectors.tensors))))


@torch.no_grad()
def trace(
    model: CausalLM, cache: KVCache, names: dict[object, str], adapted: Sequence[LoRATarget] | None = None
) -> Traced:
    """Trace the model with a cache of this format, for any numbers of tokens, sequences, output rows, blocks and slots.

    The inputs `stored` of the program are the keys and values of `cache`, then its recurrent states.

    names: the names of already named weights, by their storage; new weights are added.
    adapted: the layers whose adapters are inputs, with any numbers of slots and ranks; None: a step without adapters.
    """
    shape = TRACED._replace(
        num_prompt_features=model.num_prompt_features,
        num_adapted=TRACED.num_tokens,
        num_states=TRACED.num_sequences,
        num_windowed=TRACED.num_sequences,
    )
    inputs = graph_inputs(model, adapted is not None)
    layers = [] if adapted is None else adapted
    fields = {name: torch.zeros(shape.fields[name], dtype=torch.int64) for name in inputs}
    if model.before is not None:
        fields[STREAM] = torch.zeros(shape.num_tokens, model.before.width, dtype=cache.dtype)
    stored = [part.new_zeros(NUM_BLOCKS, BLOCK_SIZE, *part.shape[2:]) for part in cache.tensors]
    stored += [state.new_zeros(NUM_STATE_SLOTS, *state.shape[1:]) for state in cache.states]
    tables = [list(vars(_empty_table(layer, cache.dtype)).values()) for layer in layers]
    any_size: dict[str, object] = {name: {0: Dim.DYNAMIC} for name in fields}
    any_size |= {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in fields if name.endswith("_tables")}
    any_pool = [{0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for _ in cache.tensors] + [{0: Dim.DYNAMIC} for _ in cache.states]
    any_table = [[dict.fromkeys(range(min(part.ndim, 2)), Dim.DYNAMIC) for part in table] for table in tables]
    arguments = fields, stored, tables
    any_shape = any_size, any_pool, any_table
    step = torch.export.export(Step(model, cache, layers).eval(), arguments, dynamic_shapes=any_shape, strict=False)
    traced = _with_weights(step, names, *arguments)
    for node in traced.program.graph.nodes:  # these entries hold paths and code of this machine
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
            node.meta.pop(key, None)
    return traced


def _with_weights(
    step: ExportedProgram,
    names: dict[object, str],
    fields: dict[str, Tensor],
    stored: list[Tensor],
    tables: list[list[Tensor]],
) -> Traced:
    """Make the weights inputs, between `stored` and `tables`.

    The program then holds no weights, and their file can be mapped.
    """
    tensors_by_target, used_names = {**step.state_dict, **step.constants}, {*names.values()}
    weights = dict[str, Tensor]()
    nodes = {node.name: node for node in step.graph.find_nodes(op="placeholder")}
    weight_nodes, input_nodes = dict[str, Node](), list[Node]()
    for spec in step.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.target is None:
            input_nodes.append(node)
            continue
        tensor = tensors_by_target[spec.target].detach()
        memory = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        target = spec.target.removeprefix("model.")
        name = names.setdefault(memory, target if target not in used_names else f"{target}.{len(names)}")
        if name in weights:  # a weight with several names is stored once
            node.replace_all_uses_with(weight_nodes[name])
            step.graph.erase_node(node)
        else:
            weights[name], weight_nodes[name] = tensor.contiguous(), node
    num_before = len(fields) + len(stored)
    inputs = [*input_nodes[:num_before], *weight_nodes.values(), *input_nodes[num_before:]]
    first = next(node for node in step.graph.nodes if node.op != "placeholder")
    for node in inputs:
        first.prepend(node)
    specs = [InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None) for node in inputs]
    parts, in_spec = ["fields", "stored", "weights", "tables"], tree_structure(((fields, stored, weights, tables), {}))
    signature = replace(step.module_call_graph[0].signature, in_spec=in_spec, forward_arg_names=parts)
    program = ExportedProgram(
        step.graph_module,
        step.graph,
        ExportGraphSignature(specs, step.graph_signature.output_specs),
        {},
        step.range_constraints,
        [ModuleCallEntry("", signature)],
        verifiers=step.verifiers,
    )
    return Traced(program, weights)
