"""T tokens, E hidden channels, F channels of an expert, N experts, K experts of each token."""

import torch
from torch import Tensor

from kernels.quantize_rows.reference import quantize_rows
from kernels.quantize_rows.rows import ActivationFormat
from kernels.swiglu.reference import swiglu


def mixture(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up_rows: ActivationFormat | None = None,
    down_rows: ActivationFormat | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts (arXiv 1701.06538): down(silu(gate(x)) * up(x)).

    x [T, E]; gate_up [2N, F, E], first all gate weights, then all up weights; down [N, E, F]; all in x's dtype. weights
    float32 and chosen int64, both [T, K]; the experts of a token are distinct. With `gate_up_rows` x is quantised
    before the first product, with `down_rows` the hidden activations before the second. Returns [T, E] in x's dtype;
    the sum over experts is float32.
    """
    output, experts = torch.zeros(x.shape, device=x.device), len(down)
    for number in range(experts):
        tokens, ranks = (chosen == number).nonzero(as_tuple=True)
        rows = _rounded(x[tokens], gate_up_rows, number)
        hidden = swiglu(rows @ gate_up[number].T, rows @ gate_up[experts + number].T)  # [*, F]
        result = _rounded(hidden, down_rows, number) @ down[number].T
        output[tokens] += weights[tokens, ranks, None] * result.float()
    return output.to(x.dtype)


def route(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Return the K most likely experts of each token: weights float32 and expert numbers int64, both [T, K]. If
    logits are equal, the lower number is first.

    logits [T, N]. The softmax is over all experts. The K weights sum to 1 if `renormalise` (arXiv 2401.04088), else to
    at most 1 (arXiv 2101.03961).
    """
    chosen = logits.argsort(dim=-1, descending=True, stable=True)[:, :num_chosen]
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if renormalise else weights, chosen


def route_corrected(
    logits: Tensor,
    correction: Tensor,
    num_chosen: int,
    renormalise: bool,
    is_softmax: bool = False,
    num_groups: int = 1,
    num_kept: int = 1,
    num_scored: int = 2,
) -> tuple[Tensor, Tensor]:
    """Return the K experts of each token with the highest corrected scores, and their uncorrected scores, as `route`
    does.

    logits float32 [T, N]; correction float32 [N] balances the load of the experts without an auxiliary loss (arXiv
    2408.15664). Scores are sigmoids, or a softmax over all experts. Experts are in groups of equal size; only the
    `num_kept` groups with the highest sum of their `num_scored` best scores are eligible: two (arXiv 2412.19437, section
    2.1.2) or one (arXiv 2405.04434, section 2.2.2). The K weights sum to 1 if `renormalise`.
    """
    scores = logits.softmax(-1) if is_softmax else 1 / (1 + (-logits).exp())
    corrected = scores + correction
    if num_kept < num_groups:
        grouped = corrected.unflatten(-1, (num_groups, -1))  # [T, C, N / C]
        sums = grouped.topk(num_scored).values.sum(-1)  # [T, C]
        kept = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, sums.topk(num_kept).indices, True)
        corrected = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = corrected.topk(num_chosen).indices
    weights = scores.gather(-1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) if renormalise else weights, chosen


def group_rows(x: Tensor, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return every token's row once for each of its experts, ordered by expert, then by token.

    x [T, E], chosen int64 [T, K]; the experts of a token are distinct. Returns rows [T * K, E]; starts int64 [N + 1],
    the first row of each expert, then the end; places int64 [T, K], the row of each pair of token and expert.
    """
    order = chosen.flatten().argsort(stable=True)
    starts = torch.zeros(num_experts + 1, dtype=torch.int64, device=x.device)
    starts[1:] = torch.bincount(chosen.flatten(), minlength=num_experts).cumsum(0)
    places = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=x.device))
    return x[order // chosen.shape[1]], starts, places.view_as(chosen)


def combine_rows(parts: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Return each token's weighted sum of its experts' results, [T, E] in the dtype of parts.

    parts [T * K, E], weights float32 [T, K], places [T, K] as returned by `group_rows`.

    The sum is float32 (float64 for parts of float64) and in the order of expert numbers, so that a token's bits depend
    neither on other tokens nor on the order of its experts in `chosen`.
    """
    places, order = places.sort(-1)
    weights = weights.gather(-1, order)
    total = torch.zeros(
        len(places), parts.shape[1], dtype=torch.promote_types(parts.dtype, torch.float32), device=parts.device
    )
    for rank in range(places.shape[1]):
        total += weights[:, rank, None] * parts[places[:, rank]].to(total.dtype)
    return total.to(parts.dtype)


def _rounded(x: Tensor, rows: ActivationFormat | None, expert: int) -> Tensor:
    """Return x quantised and dequantised."""
    if rows is None:
        return x
    static = None if rows.static_scales is None else rows.static_scales[expert].expand(len(x))
    codes, scales = quantize_rows(x, rows.dtype, rows.group_size, static)
    size = rows.group_size or x.shape[1]
    return codes.to(x.dtype) * scales.to(x.dtype).repeat_interleave(size, 1)[:, : x.shape[1]]
