"""Mixtures of experts: each token goes through the few feed-forward layers that its router chooses (arXiv 1701.06538).

T tokens, E hidden channels, F channels of an expert, N experts, K experts of each token.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.linear.gpu_weight import GPUWeight, stack
from kernels.moe import combine_rows, group_rows, mixture, route
from models.config import ConfigReader
from models.layers.linear import FloatLinear, GPULinear, GroupedProduct, JointLinear
from models.layers.mlp import MLP


@dataclass(frozen=True)
class MixtureConfig:
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    """Whether the weights of a token's experts are made to add up to 1."""
    sparse_layers: tuple[bool, ...]
    """Whether each layer is a mixture."""


def read_mixture(config: ConfigReader, num_layers: int) -> MixtureConfig:
    """Qwen's keys of config.json. Raises UserError for a missing key, a wrong type, or more experts per token than there are."""
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
        norm_topk_prob=config.get("norm_topk_prob", bool, False),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )


class Experts(nn.ModuleList):
    """A layer's experts, gated feed-forward layers of one shape, under the checkpoint's names: `0.gate_proj.weight` and so on.

    `prepare` chooses how they are computed together; without it, or where their weights are held in ways that no kernel takes together,
    one expert computes its tokens after the other. With the C++ kernels a token's bits never depend on the other tokens.
    """

    def __init__(self, experts: Iterable[MLP], num_experts_per_tok: int) -> None:
        super().__init__(experts)
        self.num_experts_per_tok = num_experts_per_tok
        self._products: tuple[GroupedProduct, GroupedProduct] | None = None  # gate with up, and down
        self._stacked: tuple[GPUWeight, GPUWeight] | None = None  # gates and then ups; downs
        # of the same two: a layer, and the `row_scale` of each expert
        self._rows: tuple[tuple[GPULinear, Tensor | None], ...] = ()

    def active_share(self, num_tokens: int) -> float:
        """Of all experts, those that so many tokens read together, if each is as likely chosen as any other."""
        return 1 - (1 - self.num_experts_per_tok / len(self)) ** num_tokens

    def prepare(self) -> None:
        """Once the weights are there and stay: all experts in a few calls. On a GPU their weights come to lie in one for all experts."""
        gate, up, down = map(list, zip(*(expert.parts for expert in self), strict=True))
        gates_and_ups, downs = _alike(gate + up), _alike(down)
        gates, ups = gates_and_ups[: len(self)], gates_and_ups[len(self) :]
        if gates and downs and all(map(_share_codes, gates, ups)):
            self._stacked = _stack(gates_and_ups), _stack(downs)
            self._rows = (gates[0], _row_scales(gates)), (downs[0], _row_scales(downs))
        elif _can_group(gate + up) and _can_group(down):
            self._products = gate[0].grouped(gate, up), down[0].grouped(down)  # type: ignore[operator]

    @property
    def is_together(self) -> bool:
        """Whether `prepare` found a way."""
        return self._stacked is not None or self._products is not None

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of each token's experts. x and the result [T, E]; weights float32 and chosen int64 [T, K]."""
        if self._stacked is not None:
            codes = (layer.row_codes(chosen.numel(), len(self), scales) for layer, scales in self._rows)
            return mixture(x, *self._stacked, weights, chosen, *codes)
        rows, starts, places = group_rows(x, chosen, len(self))
        if self._products is None:
            parts = self._one_by_one(rows, starts.tolist())
        else:
            gated, down = self._products
            parts = down(gated(rows, starts), starts)
        return combine_rows(parts, weights, places)

    def _one_by_one(self, rows: Tensor, starts: list[int]) -> Tensor:
        parts = torch.empty_like(rows)
        for expert, start, end in zip(self, starts, starts[1:], strict=False):
            if start < end:
                parts[start:end] = expert(rows[start:end])
        return parts


class SparseMoeBlock(nn.Module):
    """A router and the experts that it chooses from."""

    input_layers: tuple[nn.Module, ...] = ()  # the router reads x, too, and in floats

    def __init__(self, hidden_size: int, c: MixtureConfig, expert: type[MLP] = MLP) -> None:
        super().__init__()
        self.renormalise = c.norm_topk_prob
        self.gate = FloatLinear(hidden_size, c.num_experts, bias=False)
        self.experts = Experts(
            (expert(hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts)), c.num_experts_per_tok
        )

    def forward(self, x: Tensor) -> Tensor:
        """x and the result [T, E]."""
        weights, chosen = route(self.gate(x), self.experts.num_experts_per_tok, self.renormalise)  # from logits [T, N]
        return self.experts(x, weights, chosen)  # type: ignore[no-any-return]


def _alike(layers: list[nn.Module]) -> list[GPULinear]:
    """These, if they can lie in one weight, else none."""
    found = [layer for layer in layers if isinstance(layer, GPULinear)]
    kinds = {layer.expert_kind for layer in found}
    return found if len(found) == len(layers) and len(kinds) == 1 and None not in kinds else []


def _share_codes(gate: GPULinear, up: GPULinear) -> bool:
    """Whether one of two alike can multiply what rows became for the other."""
    return gate.row_scale is None or up.row_scale is None or torch.equal(gate.row_scale, up.row_scale)


def _row_scales(layers: list[GPULinear]) -> Tensor | None:
    """float32 [layers]"""
    scales = [layer.row_scale for layer in layers if layer.row_scale is not None]
    return torch.stack(scales) if scales else None


def _can_group(layers: list[nn.Module]) -> bool:
    first = layers[0]
    return isinstance(first, JointLinear) and all(first.joins(layer) and layer.bias is None for layer in layers)


def _stack(layers: list[GPULinear]) -> GPUWeight:
    """One weight for all, of which each layer's becomes a piece."""
    weight = stack([layer.gpu_weight for layer in layers])
    for number, layer in enumerate(layers):
        layer.keep(weight.expert(number))
    return weight
