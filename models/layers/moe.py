"""Mixtures of experts: a router chooses few feed-forward layers for each token (arXiv 1701.06538).

T tokens, E hidden channels, F channels of an expert, N experts, K experts per token.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.linear import PackedWeight, WeightGroup, grouped_matmul
from kernels.linear.gpu_weight import GPUWeight, stack
from kernels.moe import combine_rows, group_rows, mixture, route
from models.batch import Batch
from models.config import ConfigReader
from models.layers.linear import Linear
from models.layers.linear_method import LinearMethod, are_alike, share_input_scale
from models.layers.missing import MissingLayer
from models.layers.mlp import MLP, UngatedMLP
from models.layers.module import Module
from models.layers.per_head import PerHead
from models.layers.tensor_parallel import ExpertParallel


@dataclass(frozen=True)
class MixtureConfig:
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    """Whether the weights of a token's experts are normalised to a sum of 1."""
    sparse_layers: tuple[bool, ...]
    """For each layer, whether it is a mixture."""


def read_mixture(config: ConfigReader, num_layers: int, norm_topk_prob: bool = False) -> MixtureConfig:
    """Read Qwen's keys of config.json. `norm_topk_prob`: the default.

    Raises UserError for a missing key, a wrong type, or more chosen experts than experts.
    """
    # transformers 5 writes num_local_experts for Qwen 3
    key = "num_experts" if config.raw("num_local_experts") is None else "num_local_experts"
    experts, chosen = config.count(key), config.count("num_experts_per_tok")
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok={chosen} is more than {key}={experts}")
    step, dense = config.count("decoder_sparse_step", 1), config.raw("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(layer not in range(num_layers) for layer in dense):
        raise UserError(f"config.json: mlp_only_layers={dense!r} is not a list of layers from 0 to {num_layers - 1}")
    return MixtureConfig(
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=config.count("moe_intermediate_size"),
        norm_topk_prob=config.get("norm_topk_prob", bool, norm_topk_prob),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )


class Experts(nn.ModuleList):
    """The experts of a layer: feed-forward layers of one shape, named as in the checkpoint: `0.gate_proj.weight`.

    `merge` prepares their joint computation. Without it, or if their methods do not allow it, the experts run one after
    the other. With the C++ kernels, a token's bits never depend on the other tokens.
    """

    def __init__(self, experts: Iterable[MLP | UngatedMLP], num_experts_per_tok: int) -> None:
        super().__init__(experts)
        self.num_experts_per_tok = num_experts_per_tok
        self._merged: MergedExperts | StackedExperts | None = None
        self._expert_parallel: ExpertParallel | None = None

    def keep(self, expert_parallel: ExpertParallel) -> None:
        """Keep this rank's experts, before loading."""
        self._expert_parallel = expert_parallel
        for number in range(len(self)):
            if number not in expert_parallel.local_experts:
                self[number] = MissingLayer()

    @property
    def _local_experts(self) -> range:
        return range(len(self)) if self._expert_parallel is None else self._expert_parallel.local_experts

    def active_share(self, num_tokens: int) -> float:
        """Return the expected share of experts that `num_tokens` tokens read, if all experts are equally likely."""
        return 1 - (1 - self.num_experts_per_tok / len(self)) ** num_tokens

    def merge(self) -> None:
        """Prepare to compute all experts in a few calls, after their weights are loaded.

        On a GPU the weights are stacked.
        """
        parts = [*map(list, zip(*(self[number].parts for number in self._local_experts), strict=True))]
        layers, methods = [*chain(*parts)], [[layer.method for layer in same] for same in parts]
        *first_methods, down_methods = methods  # gates and ups, or ups alone
        if not are_alike([*chain(*first_methods)]) or not are_alike(down_methods):
            return
        expert = self[self._local_experts.start]
        assert isinstance(expert, MLP | UngatedMLP)
        activation: Callable[..., Tensor] | None = expert.activation if isinstance(expert, MLP) else expert.act_fn
        is_plain_swiglu = activation is None and all(layer.bias is None for layer in layers)
        row_parallel = parts[-1][0].row_parallel
        if all(method.gpu_weight is None for method in chain(*methods)):
            can_merge = is_plain_swiglu or activation is not None
            if can_merge and all(method.input_scale is None for method in chain(*methods)):
                self._merged = MergedExperts(parts, len(self), activation)
        elif is_plain_swiglu and can_stack(*methods) and row_parallel is None and self._expert_parallel is None:
            self._merged = StackedExperts(*methods)
            for layer, method in zip(layers, self._merged.methods, strict=True):
                layer.method = method

    @property
    def is_merged(self) -> bool:
        return self._merged is not None

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, E] as x. weights float32 [T, K], chosen int64 [T, K]."""
        if isinstance(self._merged, StackedExperts):
            return self._merged(x, weights, chosen)
        rows, starts, places = group_rows(x, chosen, len(self))
        # an exported graph accepts only indices that group_rows makes, and never has sharded experts
        local_starts = (
            starts
            if self._expert_parallel is None
            else starts[self._local_experts.start : self._local_experts.stop + 1]
        )
        parts = (
            self._one_by_one(rows, local_starts.tolist()) if self._merged is None else self._merged(rows, local_starts)
        )
        if self._expert_parallel is not None:
            parts = self._expert_parallel.collect_rows(parts, starts)
        return combine_rows(parts, weights, places)

    def _one_by_one(self, rows: Tensor, starts: list[int]) -> Tensor:
        parts = torch.empty_like(rows)
        for number, start, end in zip(self._local_experts, starts, starts[1:], strict=False):
            if start < end:
                parts[start:end] = self[number](rows[start:end], None)
        return parts


class MergedExperts:
    """Experts on a CPU. The kernels multiply each expert's rows by its own weight in one call."""

    def __init__(self, parts: list[list[Linear]], num_experts: int, activation: Callable[..., Tensor] | None) -> None:
        """`parts`: gates, ups and downs, or ups and downs of `UngatedMLP`s.

        `num_experts`: of the whole layer, even if the lists hold only a rank's experts.
        `activation`: of each expert. None: as of `MLP`, for layers without biases.
        """
        *firsts, downs = parts
        self._first, self._down, self._row_parallel = firsts[0][0].method, downs[0].method, downs[0].row_parallel
        self._count, self._activation = num_experts, activation
        self._first_weights, self._down_weights = [_group(layers) for layers in firsts], _group(downs)
        self._first_biases = [_biases(layers) for layers in firsts]
        adds_bias = self._row_parallel is None or self._row_parallel.adds_bias
        self._down_biases = _biases(downs) if adds_bias else None

    def __call__(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Return the output [R, E] of each row's expert. Rows of expert i begin at starts[i], int64 [N + 1].

        Rows of experts on other ranks get undefined values.
        """
        x = self._first.quantized(rows, self._count)
        if self._activation is None:
            gates, ups = self._first_weights
            inner = grouped_matmul(x, gates, starts, ups)
        else:
            firsts = zip(self._first_weights, self._first_biases, strict=True)
            inner = self._activation(*(grouped_matmul(x, weights, starts, None, biases) for weights, biases in firsts))
        if self._row_parallel is not None:
            inner = self._row_parallel.gather_inputs(inner)
        down_inputs = self._down.quantized(inner, self._count)
        parts = grouped_matmul(down_inputs, self._down_weights, starts, None, self._down_biases)
        return parts if self._row_parallel is None else self._row_parallel.combine_outputs(parts)


class StackedExperts:
    """Experts on a GPU. One weight holds all gates and ups, one weight all downs."""

    def __init__(self, gates: list[LinearMethod], ups: list[LinearMethod], downs: list[LinearMethod]) -> None:
        self._gate_up, gate_up_methods = _stack(gates + ups)
        self._down, down_methods = _stack(downs)
        self.methods = gate_up_methods + down_methods
        """The methods of gates, ups and downs, in this order. Their weights are views of the stacked weights."""
        self._formats = [(methods[0], _input_scales(methods)) for methods in (gates, downs)]

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        num_rows, num_experts = chosen.numel(), self._down.codes.shape[0]
        formats = [method.activations(num_rows, num_experts) for method, _ in self._formats]
        for i, (_, scales) in enumerate(self._formats):
            format = formats[i]
            if format is not None and scales is not None:
                formats[i] = format._replace(static_scales=scales)
        return mixture(x, self._gate_up, self._down, weights, chosen, *formats)


class Router(Module):
    """Scores experts in float32: bfloat16 cannot separate the scores of many experts."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.product = PerHead()  # a product with one head

    def fuse(self) -> None:
        self.product.pack(self._one_head())

    def _one_head(self) -> Tensor:
        return self.weight[None]

    def logits(self, x: Tensor) -> Tensor:
        """Return float32 [T, N] of x [T, E]."""
        return self.product(x.float().unflatten(1, (1, -1)), self._one_head).flatten(1)


class SparseMoeBlock(Module):
    """A router and its experts."""

    readers: Sequence[Linear] = ()
    """Empty, because router and experts read floats."""

    def __init__(self, hidden_size: int, c: MixtureConfig, expert: type[MLP] = MLP) -> None:
        super().__init__()
        self.renormalise = c.norm_topk_prob
        self.gate = Linear(hidden_size, c.num_experts, bias=False, is_quantizable=False)
        self.experts = Experts(
            (expert(hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts)), c.num_experts_per_tok
        )

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        """x and the result are [T, E]."""
        logits = self.gate(x, batch)  # [T, N]
        weights, chosen = route(logits, self.experts.num_experts_per_tok, self.renormalise)
        result: Tensor = self.experts(x, weights, chosen)
        return result


def can_stack(gates: list[LinearMethod], ups: list[LinearMethod], downs: list[LinearMethod]) -> bool:
    """Return whether the experts' weights can be stacked.

    Gates and ups must have one size and format, and so must downs. No weight may permute channels. Each gate and its up
    must quantise their input alike.
    """
    formats = [
        {method.gpu_weight and method.gpu_weight.format for method in methods} for methods in (gates + ups, downs)
    ]
    pairs = zip(gates, ups, strict=True)
    is_ordered = all(method.permutation is None for method in (*gates, *ups, *downs))
    return (
        is_ordered
        and all(len(group_formats) == 1 for group_formats in formats)
        and all(share_input_scale(pair) for pair in pairs)
    )


def _group(layers: list[Linear]) -> WeightGroup:
    return WeightGroup([weight for layer in layers if isinstance(weight := layer.method.weight, PackedWeight)])


def _biases(layers: list[Linear]) -> Tensor | None:
    """Return the biases [layers, O]. None: the layers have none."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return torch.stack(biases) if biases else None


def _stack(methods: list[LinearMethod]) -> tuple[GPUWeight, list[LinearMethod]]:
    weight = stack([gpu_weight for method in methods if (gpu_weight := method.gpu_weight) is not None])
    return weight, [method.with_weight(weight.expert(number)) for number, method in enumerate(methods)]


def _input_scales(methods: list[LinearMethod]) -> Tensor | None:
    """Return the static activation scales, float32 [N]. None: each row has its own scale."""
    scales = [method.input_scale for method in methods if method.input_scale is not None]
    return torch.stack(scales) if scales else None
