"""The bytes and operations of each rank of a sharded model, estimated from the model on the meta device.

Layers of the same kind are inspected once. Only the first expert of a mixture is inspected.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace

import torch
from torch import nn

from kernels.linear.compressed import GROUP, GROUP_BYTES, is_gain
from models.causal_lm import CausalLM
from models.layers.attention import Heads
from models.layers.dense import PackedDenseMethod
from models.layers.embedding import Embedding
from models.layers.linear import Linear, tied_embedding
from models.layers.linear_method import LinearMethod
from models.layers.moe import Experts
from models.layout import Unit
from models.parallel import check_experts
from models.sharding import count, shard, shard_heads, shard_inputs, shard_outputs, stages
from models.weights import parameter_dtype


@dataclass(frozen=True)
class Cost:
    """Bytes and operations of a rank for a part of the model. The sum of two costs is a cost."""

    stored_bytes: int = 0
    """Bytes of weights before compression. The layers are assigned to pipeline stages by this number."""
    weight_bytes: int = 0
    read_bytes: int = 0
    """Bytes of weights read in every step."""
    expert_bytes: int = 0
    """Bytes of expert weights, which a step reads if it chooses all experts; not part of `read_bytes`."""
    macs: int = 0
    """Multiply-adds per token."""
    expert_macs: int = 0
    """Multiply-adds of a token that is routed to all experts; not part of `macs`."""
    cache_bytes: int = 0
    """Bytes of a KV cache block."""
    num_gathers: int = 0
    """Number of exchanges between the ranks of a stage per step."""
    gathered: int = 0
    """Numbers per token in all these exchanges together."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, number: int) -> "Cost":
        return Cost(*(number * value for value in astuple(self)))


@dataclass(frozen=True)
class RowLayer:
    """A row-parallel linear layer: its inputs are sharded, and a rank may multiply only its own inputs."""

    method: LinearMethod
    dtype: torch.dtype
    bias_bytes: int
    of_attention: bool

    def shard(self, inputs: int, heads: Heads, tp: int, rank: int) -> tuple[int, int] | None:
        """Return the bytes of a rank's shard and its number of inputs. None if the layer gathers its inputs instead."""
        has_heads = self.of_attention and heads is not NO_HEADS
        num_heads = (heads.num_attention_heads, heads.num_key_value_heads) if has_heads else None
        ranges = shard_inputs(inputs, num_heads, tp)
        shared = self.method.shard_inputs(ranges, rank)
        return None if shared is None else (shared[0].num_bytes(self.dtype) + self.bias_bytes, len(ranges[rank]))


@dataclass(frozen=True)
class CostedTensor:
    """A linear layer with its bias, or another tensor."""

    num_bytes: int
    outputs: int
    inputs: int
    """0 for a tensor that is not the weight of a product."""
    units: tuple[Unit, ...] | None
    """Units of its outputs, by which they are sharded; None: replicated on every rank."""
    is_read: bool = True
    """Whether a step reads all of it."""
    num_experts: int = 0
    """Number of experts that have this tensor; 0: it does not belong to an expert."""
    gathered: int = 0
    """Numbers per row that are gathered before and after it."""
    num_gathers: int = 0
    num_rows: int = 1
    """Rows per token: the experts per token."""
    row: RowLayer | None = None
    is_compressible: bool = False
    """Whether the kernels may hold it in 12 bits per number, if that is smaller."""


NO_HEADS = Heads(0, 0, 0, 0)
"""Of a layer without attention, which is made of channels. The bytes of recurrent states are not counted."""


def _rank_heads(heads: Heads, tp: int, rank: int) -> Heads:
    head_shard = shard_heads(heads.num_attention_heads, heads.num_key_value_heads, tp, rank)
    return replace(heads, num_attention_heads=len(head_shard.queries), num_key_value_heads=len(head_shard.keys))


class ParallelCosts:
    """The costs of a model's layers, and of the modules before and after them, for any number of ranks."""

    def __init__(
        self,
        model: CausalLM,
        kinds: tuple[Hashable, ...],
        shared_caches: Mapping[int, int],
        dtype: torch.dtype,
        block_bytes: Callable[[Heads], int],
        adds: bool = False,
        whole_experts: bool = False,
        compresses: bool = False,
    ) -> None:
        """`kinds`: the kind of every layer; `model` has the first layer of each kind. `shared_caches`: as of
        the whole model's `ModelShape`.

        `block_bytes`: bytes of one layer in a KV cache block. `adds`, `whole_experts`: as in `ParallelLayout`.
        `compresses`: packed bfloat16 weights are held in 12 bits if that is smaller, as on this machine. Raises
        UserError for whole experts of a model without experts.
        """
        if whole_experts:
            check_experts(model, 1)
        self._adds, self._whole_experts, self._compresses = adds, whole_experts, compresses
        self.num_layers = len(kinds)
        self.hidden_size = int(next(model.final_norm.parameters()).shape[0])
        self._model, self._kinds, self._dtype, self._block_bytes = model, kinds, dtype, block_bytes
        experts = next((module for module in model.modules() if isinstance(module, Experts)), None)
        self.active_share = (lambda num_tokens: 1.0) if experts is None else experts.active_share
        """Maps a number of tokens to the share of experts that they are expected to choose."""
        firsts = {kind: kinds.index(kind) for kind in kinds}
        attentions = {kind: model.attention_module(model.layers[index]) for kind, index in firsts.items()}
        self._heads: dict[Hashable, Heads] = {
            kind: NO_HEADS if attention is None else attention.heads  # type: ignore[misc]
            for kind, attention in attentions.items()
        }
        self._caches = {kind: model.layer_caches[index].heads for kind, index in firsts.items()}
        self._shared_caches = shared_caches
        self._layers = {kind: self._parts(model.layers[index].named_modules()) for kind, index in firsts.items()}
        self._first, self._last = self._ends()
        self._tied: Counter[CostedTensor] = Counter()
        """The embedding module, if the head is tied to it."""
        if tied_embedding(model.head) is not None:
            self._tied.update(self._own_parts(model.layout.embedding, model.embedding, 0))
        self._known: dict[tuple[Hashable, int, int], Cost] = {}

    def rank(self, layers: range, tp: int, tp_rank: int) -> Cost:
        """Return the cost of a rank of the stage that has these layers.

        Raises UserError for more ranks than heads, channels or whole experts.
        """
        if self._whole_experts:
            check_experts(self._model, tp)
        cost = Cost()
        for kind, number in Counter(self._kinds[layers.start : layers.stop]).items():
            cost += self._layer(kind, tp, tp_rank) * number
        heads = self._heads[self._kinds[0]]
        if layers.start == 0:
            cost += self._sum(self._first, heads, tp, tp_rank)
        if layers.stop == self.num_layers:
            cost += self._sum(self._last, heads, tp, tp_rank)
            if layers.start > 0:  # the last stage has a copy of the embedding for the head and looks nothing up in it
                cost += replace(self._sum(self._tied, heads, tp, tp_rank), num_gathers=0, gathered=0)
        return cost

    def stages(self, pp: int) -> list[range]:
        """Return the layers of each stage, as `models.parallel.stage_layers` does.

        Raises UserError for more stages than layers.
        """
        heads = self._heads[self._kinds[0]]
        first, last = (self._sum(parts, heads, 1, 0).stored_bytes for parts in (self._first, self._last + self._tied))
        layers = [self._layer(kind, 1, 0).stored_bytes for kind in self._kinds]
        return stages(layers, first, last, pp, self._shared_caches)

    def _layer(self, kind: Hashable, tp: int, rank: int) -> Cost:
        if (kind, tp, rank) not in self._known:
            heads, cached, cache_bytes = self._heads[kind], self._caches[kind], 0
            if cached is not None:
                cache_bytes = self._block_bytes(_rank_heads(cached, tp, rank))
            self._known[kind, tp, rank] = self._sum(self._layers[kind], heads, tp, rank) + Cost(cache_bytes=cache_bytes)
        return self._known[kind, tp, rank]

    def _sum(self, parts: Counter[CostedTensor], heads: Heads, tp: int, rank: int) -> Cost:
        return sum((self._cost(part, heads, tp, rank) * number for part, number in parts.items()), Cost())

    def _cost(self, part: CostedTensor, heads: Heads, tp: int, rank: int) -> Cost:
        """Return the cost of a part for a rank. The cost of an expert's part includes all experts of the rank."""
        number, num_rows = part.num_experts, part.num_rows
        if number and self._whole_experts:
            number = len(shard(number, tp, rank))
            num_bytes, macs = part.num_bytes, part.outputs * part.inputs
            # ranks exchange only the outputs of experts
            gathers, gathered = (0, 0) if part.row is None else (1, part.outputs)
        else:
            num_bytes, macs, gathers, gathered = self._share(part, heads, tp, rank)
        held_bytes = num_bytes
        if part.is_compressible and self._compresses and is_gain(num_bytes):
            held_bytes = num_bytes * GROUP_BYTES // (2 * GROUP)
        if not part.num_experts:
            return Cost(num_bytes, held_bytes, held_bytes if part.is_read else 0, 0, macs, 0, 0, gathers, gathered)
        stored, held_bytes, macs = (number * amount for amount in (num_bytes, held_bytes, macs))
        return Cost(stored, held_bytes, 0, held_bytes, 0, macs, 0, gathers, num_rows * gathered)

    def _share(self, part: CostedTensor, heads: Heads, tp: int, rank: int) -> tuple[int, int, int, int]:
        """Return a rank's bytes, multiply-adds, exchanges and exchanged numbers of a part."""
        shared = part.row.shard(part.inputs, heads, tp, rank) if part.row and self._adds and tp > 1 else None
        if shared is not None:
            num_bytes, inputs = shared
            return num_bytes, part.outputs * inputs, 1, part.outputs * tp
        num_outputs = part.outputs
        if part.units is not None:
            num_heads = None if heads is NO_HEADS else (heads.num_attention_heads, heads.num_key_value_heads)
            num_outputs = count(shard_outputs(part.units, part.outputs, num_heads, tp, rank))
        return part.num_bytes * num_outputs // part.outputs, num_outputs * part.inputs, part.num_gathers, part.gathered

    def _ends(self) -> tuple[Counter[CostedTensor], Counter[CostedTensor]]:
        ends: tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]] = ([], [])
        layers, is_after = self._model.layout.layers, False
        for name, module in self._model.named_modules():
            is_after |= name == layers
            if not name.startswith(f"{layers}."):
                ends[is_after].append((name, module))
        return self._parts(ends[0]), self._parts(ends[1])

    def _parts(self, modules: Iterable[tuple[str, nn.Module]]) -> Counter[CostedTensor]:
        """Return the parts that these modules have directly, and the count of each."""
        parts: Counter[CostedTensor] = Counter()
        # By module of an expert: the number of experts, and of experts per token. The first expert of a mixture counts
        # for all experts; the number of experts is 0 in the entries of the remaining experts.
        experts: dict[nn.Module, tuple[int, int]] = {}
        for name, module in modules:
            if isinstance(module, Experts):
                for i, expert in enumerate(module):
                    numbers = 0 if i else len(module), module.num_experts_per_tok
                    experts |= dict.fromkeys(expert.modules(), numbers)
            if module not in experts:
                parts.update(self._own_parts(name, module, 0))
            elif experts[module][0]:
                number, num_rows = experts[module]
                parts.update(replace(part, num_rows=num_rows) for part in self._own_parts(name, module, number))
        return parts

    def _own_parts(self, path: str, module: nn.Module, num_experts: int) -> list[CostedTensor]:
        if isinstance(module, Embedding):
            return [self._embedding(path, module, num_experts)]
        if not isinstance(module, Linear):
            return [
                self._tensor(module, f"{path}.{name}", parameter, num_experts)
                for name, parameter in module.named_parameters(recurse=False)
            ]
        layout, leaf, (outputs, inputs) = self._model.layout, path.rpartition(".")[2], module.shape
        dtype = parameter_dtype(self._model, f"{path}.weight", self._dtype)
        num_bytes = module.method.num_bytes(dtype) if module.tied_embedding is None else 0
        bias_bytes = 0 if module.bias is None else module.bias.numel() * self._dtype.itemsize
        num_bytes += bias_bytes
        units = None if leaf in layout.replicated else layout.units.get(leaf, (Unit.CHANNEL,))
        is_compressible = isinstance(module.method, PackedDenseMethod) and dtype is torch.bfloat16
        if module is self._model.head:
            part = CostedTensor(num_bytes, outputs, inputs, units, gathered=outputs, num_gathers=1)
        elif leaf not in layout.row_parallel:
            part = CostedTensor(num_bytes, outputs, inputs, units, num_experts=num_experts)
        else:
            row = RowLayer(module.method, dtype, bias_bytes, path.startswith(f"{layout.attention}."))
            part = CostedTensor(
                num_bytes, outputs, inputs, (Unit.CHANNEL,), True, num_experts, inputs + outputs, 2, row=row
            )
        return [replace(part, is_compressible=is_compressible)]

    def _embedding(self, path: str, module: Embedding, num_experts: int) -> CostedTensor:
        method, (vocab_size, channels) = module.method, module.shape
        dtype = parameter_dtype(self._model, f"{path}.weight", self._dtype)
        num_bytes = method.num_bytes(dtype)
        if module is not self._model.embedding:  # position embedding
            return CostedTensor(num_bytes, 1, 0, None, False, num_experts)
        is_read = module is tied_embedding(self._model.head)
        is_compressible = isinstance(method, PackedDenseMethod) and dtype is torch.bfloat16
        part = CostedTensor(num_bytes, vocab_size, 0, (Unit.CHANNEL,), is_read, 0, channels, 1)
        return replace(part, is_compressible=is_compressible)

    def _tensor(self, module: nn.Module, name: str, parameter: nn.Parameter, num_experts: int) -> CostedTensor:
        size = parameter.numel() * parameter_dtype(self._model, name, self._dtype).itemsize
        if module is self._model.head:  # Baichuan 2 normalises the head's weight
            outputs, inputs = parameter.shape
            return CostedTensor(size, outputs, inputs, (Unit.CHANNEL,), gathered=outputs, num_gathers=1)
        heads = getattr(module, "heads", None)  # the scales of an attention module's KV cache may be per head
        if isinstance(heads, Heads) and parameter.ndim and len(parameter) == heads.num_key_value_heads:
            return CostedTensor(size, len(parameter), 0, (Unit.KEY_VALUE_HEAD,))
        return CostedTensor(size, 1, 0, None, num_experts=num_experts)
