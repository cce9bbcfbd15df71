"""Mixtures of experts: each token goes through the few feed-forward layers that its router chooses (arXiv 1701.06538).

T tokens, E hidden channels, N experts, K experts of each token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.errors import UserError
from models.config import ConfigReader


@dataclass(frozen=True)
class MixtureConfig:
    """Qwen's keys of config.json, checked."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    """Whether each layer is a mixture."""


def read_mixture(config: ConfigReader, num_layers: int) -> MixtureConfig:
    """Raises UserError for a missing key, a wrong type, or more experts per token than there are."""
    key = (
        "num_experts" if config.raw("num_local_experts") is None else "num_local_experts"
    )  # so transformers 5 writes Qwen 3
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


def route(logits: Tensor, num_experts_per_tok: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The K likeliest experts of each token: weights float32 and numbers int64, both [T, K]. logits [T, N].

    The softmax is over all experts; renormalised, the K weights sum to 1 (arXiv 2401.04088), else to less (arXiv 2101.03961).
    """
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(num_experts_per_tok, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if renormalise else weights, chosen


def run_experts(experts: nn.ModuleList, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The weighted sum of each token's experts. x and the result [T, E]; weights and chosen [T, K].

    An expert computes only its own tokens. A token's sum runs in the order of the experts' numbers, so that its bits do not
    depend on the other tokens.
    """
    weights = weights.to(x.dtype)
    output = torch.zeros_like(x)
    for number in chosen.unique().tolist():
        rows, ranks = (chosen == number).nonzero(
            as_tuple=True
        )  # each row once, for a token's experts are all different
        output[rows] += weights[rows, ranks, None] * experts[number](x[rows])
    return output
