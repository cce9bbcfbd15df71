"""Mixtures of experts: each token goes through the few feed-forward layers that its router chooses (arXiv 1701.06538).

T tokens, E hidden channels, N experts, K experts of each token.
"""

import torch
from torch import Tensor, nn


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
