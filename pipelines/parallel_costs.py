"""What a rank of a divided model holds, reads and computes, reckoned from the model on the meta device.

Layers that are alike are looked at once, and of a mixture's experts the first.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import astuple, dataclass, replace

import torch
from torch import nn

from kernels.linear.compressed import GROUP, GROUP_BYTES, is_gain
from models.causal_lm import CausalLM
from models.layers.attention import Heads
from models.layers.dense import PackedDenseMethod
from models.layers.linear import Linear, tied_weight
from models.layers.linear_method import LinearMethod
from models.layers.moe import Experts
from models.layout import Unit
from models.parallel import check_experts
from models.sharding import count, shard, shard_heads, shard_inputs, shard_outputs, stages
from models.weights import parameter_dtype


@dataclass(frozen=True)
class Cost:
    """Counts the bytes and operations of a rank for a part of the model. The sum of two costs is a cost."""

    stored_bytes: int = 0
    """Of the weights before they are compressed: by these the layers are divided into stages."""
    weight_bytes: int = 0
    read_bytes: int = 0
    """Of the weights, in every step."""
    expert_bytes: int = 0
    """Of the weights, in a step in which all experts are chosen; not among `read_bytes`."""
    macs: int = 0
    """Multiplications with additions for a token."""
    expert_macs: int = 0
    """Those for a token that had all experts; not among `macs`."""
    cache_bytes: int = 0
    """Of a block of the KV cache."""
    num_gathers: int = 0
    """Times in a step that a stage's ranks exchange pieces."""
    gathered: int = 0
    """Numbers of a token in all of these together."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, number: int) -> "Cost":
        return Cost(*(number * value for value in astuple(self)))


@dataclass(frozen=True)
class RowLayer:
    """A linear layer whose inputs come in pieces, of which a rank may multiply its own alone."""

    method: LinearMethod
    dtype: torch.dtype
    bias_bytes: int
    of_attention: bool

    def shard(self, inputs: int, heads: Heads, tp: int, rank: int) -> tuple[int, int] | None:
        """Return the bytes of a rank's part and how many of the inputs it has. None where the layer gathers them."""
        num_heads = (heads.num_attention_heads, heads.num_key_value_heads) if self.of_attention else None
        ranges = shard_inputs(inputs, num_heads, tp)
        shared = self.method.shard_inputs(ranges, rank)
        return None if shared is None else (shared[0].num_bytes(self.dtype) + self.bias_bytes, len(ranges[rank]))


@dataclass(frozen=True)
class CostedTensor:
    """A linear layer with its bias, or another tensor."""

    num_bytes: int
    outputs: int
    inputs: int
    """0 for what multiplies nothing."""
    units: tuple[Unit, ...] | None
    """What its outputs are made of; None: every rank has it whole."""
    is_read: bool = True
    """Whether a step reads all of it."""
    num_experts: int = 0
    """How many experts have one; 0: it is no expert's."""
    gathered: int = 0
    """Numbers of a row that are gathered before it and after it."""
    num_gathers: int = 0
    num_rows: int = 1
    """Of a token: the experts that it chooses."""
    row: RowLayer | None = None
    is_compressible: bool = False
    """Whether the kernels hold it in 12 bits a number where that is a gain."""


class ParallelCosts:
    """The costs of a model's layers, of what comes before them and of what comes after them, for any number of ranks."""

    def __init__(
        self,
        model: CausalLM,
        kinds: tuple[Hashable, ...],
        dtype: torch.dtype,
        block_bytes: Callable[[Heads], int],
        adds: bool = False,
        whole_experts: bool = False,
        compresses: bool = False,
    ) -> None:
        """`kinds` are those of all layers: `model` has the first of each. `block_bytes`: of a layer's part of a block of the KV cache.

        `adds` and `whole_experts` are those of a `ParallelLayout`. `compresses`: packed bfloat16 is held as by this machine, in 12 bits
        where that is a gain. Raises UserError for whole experts of a model without any.
        """
        if whole_experts:
            check_experts(model, 1)
        self._adds, self._whole_experts, self._compresses = adds, whole_experts, compresses
        self.num_layers = len(kinds)
        self.hidden_size = int(next(model.final_norm.parameters()).shape[0])
        self._model, self._kinds, self._dtype, self._block_bytes = model, kinds, dtype, block_bytes
        experts = next((module for module in model.modules() if isinstance(module, Experts)), None)
        self.active_share = (lambda num_tokens: 1.0) if experts is None else experts.active_share
        """The share of all experts that so many tokens are expected to choose."""
        firsts = {kind: kinds.index(kind) for kind in kinds}
        self._heads = {kind: model.attention_heads[index] for kind, index in firsts.items()}
        self._layers = {kind: self._parts(model.layers[index].named_modules()) for kind, index in firsts.items()}
        self._first, self._last = self._ends()
        self._tied: Counter[CostedTensor] = Counter()
        """The embedding, where the head is loaded of it."""
        if tied_weight(model.head) is not None or isinstance(model.head, Linear) and model.head.embedding is not None:
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
            if layers.start > 0:  # and nothing is looked up in its embedding
                cost += replace(self._sum(self._tied, heads, tp, tp_rank), num_gathers=0, gathered=0)
        return cost

    def stages(self, pp: int) -> list[range]:
        """Return the layers of each stage, as `models.parallel.stage_layers`. Raises UserError for more stages than layers."""
        heads = self._heads[self._kinds[0]]
        first, last = (self._sum(parts, heads, 1, 0).stored_bytes for parts in (self._first, self._last + self._tied))
        layers = [self._layer(kind, 1, 0).stored_bytes for kind in self._kinds]
        return stages(layers, first, last, pp)

    def _layer(self, kind: Hashable, tp: int, rank: int) -> Cost:
        if (kind, tp, rank) not in self._known:
            heads = self._heads[kind]
            own = shard_heads(heads.num_attention_heads, heads.num_key_value_heads, tp, rank)
            of_rank = replace(heads, num_attention_heads=len(own.queries), num_key_value_heads=len(own.keys))
            cost = self._sum(self._layers[kind], heads, tp, rank) + Cost(cache_bytes=self._block_bytes(of_rank))
            self._known[kind, tp, rank] = cost
        return self._known[kind, tp, rank]

    def _sum(self, parts: Counter[CostedTensor], heads: Heads, tp: int, rank: int) -> Cost:
        return sum((self._cost(part, heads, tp, rank) * number for part, number in parts.items()), Cost())

    def _cost(self, part: CostedTensor, heads: Heads, tp: int, rank: int) -> Cost:
        """Return what a rank has to do with a part; of an expert's part with those of all its experts."""
        number, num_rows = part.num_experts, part.num_rows
        if number and self._whole_experts:
            number = len(shard(number, tp, rank))
            num_bytes, macs = part.num_bytes, part.outputs * part.inputs
            # what experts give is exchanged, and nothing within them
            gathers, gathered = (0, 0) if part.row is None else (1, part.outputs)
        else:
            num_bytes, macs, gathers, gathered = self._share(part, heads, tp, rank)
        held = num_bytes
        if part.is_compressible and self._compresses and is_gain(num_bytes):
            held = num_bytes * GROUP_BYTES // (2 * GROUP)
        if not part.num_experts:
            return Cost(num_bytes, held, held if part.is_read else 0, 0, macs, 0, 0, gathers, gathered)
        stored, held, macs = (number * each for each in (num_bytes, held, macs))
        return Cost(stored, held, 0, held, 0, macs, 0, gathers, num_rows * gathered)

    def _share(self, part: CostedTensor, heads: Heads, tp: int, rank: int) -> tuple[int, int, int, int]:
        """Return a rank's share of a part: its bytes, its products, its exchanges and how many numbers these exchange."""
        shared = part.row.shard(part.inputs, heads, tp, rank) if part.row and self._adds and tp > 1 else None
        if shared is not None:
            num_bytes, inputs = shared
            return num_bytes, part.outputs * inputs, 1, part.outputs * tp
        own = part.outputs
        if part.units is not None:
            num_heads = heads.num_attention_heads, heads.num_key_value_heads
            own = count(shard_outputs(part.units, part.outputs, num_heads, tp, rank))
        return part.num_bytes * own // part.outputs, own * part.inputs, part.num_gathers, part.gathered

    def _ends(self) -> tuple[Counter[CostedTensor], Counter[CostedTensor]]:
        """Return the parts before the layers, and those after them."""
        ends: tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]] = ([], [])
        layers, is_after = self._model.layout.layers, False
        for name, module in self._model.named_modules():
            is_after |= name == layers
            if not name.startswith(f"{layers}."):
                ends[is_after].append((name, module))
        return self._parts(ends[0]), self._parts(ends[1])

    def _parts(self, modules: Iterable[tuple[str, nn.Module]]) -> Counter[CostedTensor]:
        """Return the parts that these modules themselves have, and how many of each there are."""
        found: Counter[CostedTensor] = Counter()
        experts: dict[nn.Module, tuple[int, int]] = {}  # how many, and of each token; 0: one that is like the first
        for name, module in modules:
            if isinstance(module, Experts):
                for i, expert in enumerate(module):
                    numbers = 0 if i else len(module), module.num_experts_per_tok
                    experts |= dict.fromkeys(expert.modules(), numbers)
            if module not in experts:
                found.update(self._own_parts(name, module, 0))
            elif experts[module][0]:
                number, num_rows = experts[module]
                found.update(replace(part, num_rows=num_rows) for part in self._own_parts(name, module, number))
        return found

    def _own_parts(self, path: str, module: nn.Module, num_experts: int) -> list[CostedTensor]:
        if not isinstance(module, Linear):
            return [
                self._tensor(module, f"{path}.{name}", parameter, num_experts)
                for name, parameter in module.named_parameters(recurse=False)
            ]
        layout, leaf, (outputs, inputs) = self._model.layout, path.rpartition(".")[2], module.shape
        dtype = parameter_dtype(self._model, f"{path}.weight", self._dtype)
        num_bytes = module.method.num_bytes(dtype)
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

    def _tensor(self, module: nn.Module, name: str, parameter: nn.Parameter, num_experts: int) -> CostedTensor:
        """Return the part that is a parameter of no linear layer."""
        size = parameter.numel() * parameter_dtype(self._model, name, self._dtype).itemsize
        if module is self._model.embedding:
            is_read = parameter is tied_weight(self._model.head)
            return CostedTensor(size, parameter.shape[0], 0, (Unit.CHANNEL,), is_read, 0, parameter.shape[1], 1)
        if module is self._model.head:  # of Baichuan 2, which norms its weight
            outputs, inputs = parameter.shape
            return CostedTensor(size, outputs, inputs, (Unit.CHANNEL,), gathered=outputs, num_gathers=1)
        heads: Heads | None = getattr(module, "heads", None)  # whose scales of keys and values may be one for each head
        if heads is not None and parameter.ndim and len(parameter) == heads.num_key_value_heads:
            return CostedTensor(size, len(parameter), 0, (Unit.KEY_VALUE_HEAD,))
        return CostedTensor(size, 1, 0, None, not isinstance(module, nn.Embedding), num_experts)
