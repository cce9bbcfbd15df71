"""The mixtures of experts of DeepSeek-V2 and -V3: a router that is limited to the best groups (arXiv 2405.04434, 2412.19437).

T tokens, E hidden channels, X experts in C groups, K of them chosen per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.moe import route, route_corrected
from models.batch import Batch
from models.config import ConfigReader
from models.layers.constant import Constant
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.moe import Experts, Router


@dataclass(frozen=True)
class Routing:
    """The settings that choose a token's experts and their weights."""

    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    scaling_factor: float
    has_correction_bias: bool
    """Whether V3's rule applies.

    V3: scores are sigmoids, a bias corrects them only for the choice, and a group's score is the sum of its best two
    experts. V2: scores are a softmax, and a group's score is its best expert.
    """
    norm_topk_prob: bool

    @property
    def is_plain(self) -> bool:
        """Whether a token's experts are the K highest softmax scores, regardless of groups."""
        return not self.has_correction_bias and self.topk_group == self.n_group

    @property
    def num_scored(self) -> int:
        """The number of a group's best experts whose scores sum to the group's score."""
        return 2 if self.has_correction_bias else 1

    def choose(self, logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts within the best groups (V2: section 2.2.2 of its paper; V3: section 2.1.2).

        logits float32 [T, X]; correction float32 [X] of V3's rule, else zeros. Returns as `route` does.
        """
        if self.is_plain:
            weights, chosen = route(logits, self.num_experts_per_tok, self.norm_topk_prob)
        else:
            weights, chosen = route_corrected(
                logits,
                correction,
                self.num_experts_per_tok,
                self.norm_topk_prob,
                not self.has_correction_bias,
                self.n_group,
                self.topk_group,
                self.num_scored,
            )
        return weights * self.scaling_factor, chosen


def read_routing(
    config: ConfigReader,
    groups: tuple[int, int],
    has_correction_bias: bool,
    norm_topk_prob: bool,
    keys: tuple[str, str, str] = ("n_routed_experts", "num_experts_per_tok", "n_group"),
) -> Routing:
    """Read the numbers of experts. `groups`: n_group and topk_group. `keys`: the names of experts, chosen experts and
    groups. Raises UserError for inconsistent numbers."""
    experts, chosen = map(config.count, keys[:2])
    n_group, topk_group = groups
    config.check_multiple(keys[0], experts, keys[2], n_group)
    if topk_group > n_group:
        raise UserError(f"config.json: topk_group={topk_group} is more than {keys[2]}={n_group}")
    size = experts // n_group
    if has_correction_bias and size < 2:
        raise UserError(f"config.json: {keys[2]}={n_group} leaves {size} expert to a group, which needs 2 to be scored")
    if chosen > topk_group * size:
        raise UserError(
            f"config.json: {keys[1]}={chosen} is more than the {topk_group * size} experts of topk_group={topk_group} groups"
        )
    scaling_factor = config.positive("routed_scaling_factor", 1.0)
    return Routing(experts, chosen, n_group, topk_group, scaling_factor, has_correction_bias, norm_topk_prob)


class Gate(Router):
    """A router in float32 with its settings and V3's correction."""

    def __init__(self, hidden_size: int, routing: Routing) -> None:
        super().__init__(hidden_size, routing.num_experts)
        self.routing = routing
        if routing.has_correction_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(routing.num_experts))
        self._no_correction = Constant(torch.zeros(routing.num_experts, device="cpu"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, E]; returns as `route` does."""
        has_bias = self.routing.has_correction_bias
        correction = self.e_score_correction_bias if has_bias else self._no_correction.on(x.device)
        return self.routing.choose(self.logits(x), correction)


class GroupedMoE(Module):
    """K routed experts per token, and shared experts for all tokens."""

    readers: Sequence[Linear] = ()
    """As in `SparseMoeBlock`."""

    def __init__(
        self,
        hidden_size: int,
        moe_intermediate_size: int,
        n_shared_experts: int,
        routing: Routing,
        expert: type[MLP] = MLP,
    ) -> None:
        super().__init__()
        self.register_router(hidden_size, routing)
        experts = (expert(hidden_size, moe_intermediate_size) for _ in range(routing.num_experts))
        self.experts = Experts(experts, routing.num_experts_per_tok)
        self.shared_experts = MLP(hidden_size, moe_intermediate_size * n_shared_experts)

    def register_router(self, hidden_size: int, routing: Routing) -> None:
        """Register the modules and parameters that `choose` reads, under the names of the family's checkpoints."""
        self.gate: Router = Gate(hidden_size, routing)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, E]; returns as `route` does."""
        weights, chosen = self.gate(x)
        return weights, chosen

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        weights, chosen = self.choose(x)
        routed: Tensor = self.experts(x, weights, chosen)
        shared: Tensor = self.shared_experts(x, batch)
        return routed + shared
