"""Quantisation with ranks.

Rank 0 sends each step. The first rank of a part's stage chooses the part's codes, and all ranks of the stage apply
them.
"""

from dataclasses import asdict, dataclass
from functools import partial
from types import NoneType
from typing import Any

from torch import Tensor

from conf.compose import from_json
from conf.errors import UserError
from conf.quantization import QuantConfig, QuantizedFormat
from kernels.collectives import Group
from models.batch import Batch, KVCache
from models.parallel import stage_layers
from pipelines.loading.fingerprint import plain
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.share import Leave, PartStep, Rest, Result, Share, Step
from pipelines.ranks.control import Workers
from pipelines.ranks.encoding import result_type
from quantization.file_layout import FileLayout, file_layout


@dataclass(frozen=True)
class BeginQuantization:
    quant: dict[str, Any]
    """A QuantConfig, as JSON."""
    format: str
    """The name of the QuantizedFormat."""
    batches: list[Batch]


@dataclass(frozen=True)
class UseStaticCache:
    """Replace the KV cache by one with the static scales that were computed."""


class DriverShare(Share):
    """Rank 0's share of a quantisation.

    It runs each step together with the workers and returns the results of the part's stage.
    """

    def __init__(
        self,
        quant: QuantConfig,
        format: QuantizedFormat,
        layout: FileLayout,
        plan: ModelPlan,
        full_plan: ModelPlan,
        batches: list[Batch],
        cache: KVCache,
        workers: Workers,
    ) -> None:
        """`plan`: rank 0's shard.

        `full_plan`: the plan of the unsharded model, on the meta device. All methods raise RankLost if a rank fails.
        Raises UserError for a model whose layers share keys and values.
        """
        if full_plan.model.config.shared_caches:  # the whole probe would need an earlier layer's keys and values
            problem = "task=quantize with ranks supports no model whose layers read the cache of an earlier layer"
            raise UserError(f"{problem}: give parallel=single")
        workers.tell(BeginQuantization(plain(asdict(quant)), format.name, batches))
        group, parallel_layout = workers.context.group, workers.context.parallel_layout
        self._workers, self._tp = workers, parallel_layout.tp
        self._stages = stage_layers(full_plan.model, parallel_layout.pp, full_plan.dtype)
        self._reached = 0  # the stage that holds the streams
        super().__init__(quant, layout, plan.model, batches, cache, full_plan.model, plan.shards, group)

    def rest(self) -> dict[str, Tensor]:
        last = len(self._stages) - 1
        for stage in {0, last}:
            self._tell(stage, Rest())
        tensors = self._workers.meanwhile(super().rest)
        if last:
            tensors |= self._answer(last, Rest())
        return {name: tensors[name] for name, _ in self._full_model.named_parameters() if name in tensors}

    def run(self, step: PartStep[Result]) -> Result:
        """Run a step on the part's stage. Its first step receives the previous stage's streams."""
        last = self._stages[-1].stop - 1
        stage = next(i for i, layers in enumerate(self._stages) if min(step.part, last) in layers)
        self._tell(stage, step)
        if stage > self._reached:
            self._tell(self._reached, Leave())
            if self._reached == 0:
                self._workers.meanwhile(self.leave)
            self._reached = stage
        result: Result = self._answer(stage, step) if stage else self._workers.meanwhile(partial(step.compute, self))
        return result

    def static_cache(self, cache: KVCache) -> KVCache:
        self._workers.tell(UseStaticCache())
        return super().static_cache(cache)

    def _tell(self, stage: int, step: Step[Any]) -> None:
        """Send a step to a stage. The first rank of the stage returns the result."""
        first = stage * self._tp
        answering = () if result_type(step) is NoneType else (first,)
        self._workers.tell(step, answering, range(first, first + self._tp))

    def _answer(self, stage: int, step: Step[Any]) -> Any:
        kind = result_type(step)
        return None if kind is NoneType else self._workers.answer_of(stage * self._tp, kind)


def share_of(
    operation: BeginQuantization, plan: ModelPlan, batches: list[Batch], cache: KVCache, group: Group
) -> Share:
    """Return a worker's share of the quantisation that `operation` begins.

    `plan`: the rank's shard. `batches`: the operation's, on the rank's device. Raises UserError as `plan_model` does.
    """
    quant = from_json(QuantConfig, operation.quant)
    full_model = plan_model(plan.options, plan.quant, plan.source, plan.device, packed=False).model
    layout = file_layout(full_model, quant, QuantizedFormat[operation.format])
    return Share(quant, layout, plan.model, batches, cache, full_model, plan.shards, group)
