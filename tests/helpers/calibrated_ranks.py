"""A model quantised by ranks that are threads of this process."""

from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conf.quantization import CalibrateConfig, QuantConfig
from conf.schema import RunConfig
from pipelines.engine.kv_cache import allocate_kv_cache
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from pipelines.loading.quantize.job import float_model
from pipelines.loading.quantize.layers import calibration_batches
from pipelines.loading.quantize.share import Share
from pipelines.loading.shard_plan import shard_plan
from pipelines.loading.weight_loading import load_planned
from pipelines.ranks.encoding import decode, encode
from pipelines.ranks.threads import ThreadRankContext
from quantization.file_layout import file_layout
from quantization.quantizer import LinearReport
from quantization.stored_parts import StoredPart
from tests.helpers.builders import unpacked_engine
from tests.helpers.rank_threads import run_stages
from tests.helpers.waiting import LIMIT_S

CPU = torch.device("cpu")


@dataclass
class Quantized:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By their names in the files."""
    folds: dict[str, Tensor] = field(default_factory=dict)
    reports: list[LinearReport] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        """Whether all tensors have equal bits, NaN included."""
        assert isinstance(other, Quantized)
        return self._bits() == other._bits() and sorted(map(str, self.reports)) == sorted(map(str, other.reports))

    def _bits(self) -> dict[str, tuple[object, ...]]:
        all_tensors = self.tensors | self.folds
        return {
            n: (t.dtype, tuple(t.shape), t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            for n, t in all_tensors.items()
        }


def quantized_by(run: RunConfig, samples: list[list[int]], tp: int = 1, pp: int = 1) -> Quantized:
    """Return the result of task=quantize for the model of `run`. With one rank it is the share of a process of its
    own."""
    model = float_model(run.model)
    engine = unpacked_engine(replace(run, model=model, quant=QuantConfig(), calibrate=CalibrateConfig()), len(samples))
    batches = calibration_batches(engine, samples)
    sizes = engine.num_blocks, engine.block_size
    chosen: dict[int, Future[StoredPart]] = defaultdict(Future)

    def of_rank(context: ThreadRankContext) -> Quantized:
        source = resolve_model(run.model)
        whole_plan, plan = (plan_model(model, QuantConfig(), source, CPU, packed=False) for _ in range(2))
        layout = file_layout(whole_plan.model, run.quant, run.quantize.format)
        plan = shard_plan(plan, context.parallel_layout, context.group, context.neighbours)
        load_planned(plan)
        cache = allocate_kv_cache(plan.model.layer_caches, *sizes, None, plan.dtype, CPU, num_state_slots=1)
        parted = () if tp * pp == 1 else (whole_plan.model, plan.shards, context.group)
        share = Share(run.quant, layout, plan.model, batches, cache.one_of_each_shape(), *parted)
        made = Quantized(share.rest())
        for part in filter(share.has, share.parts):
            part_result = share.choose(part)
            if part_result is not None:
                fields, payload = encode(part_result)
                chosen[part.index].set_result(decode(StoredPart, fields, bytearray(payload), CPU))
            kept = chosen[part.index].result(LIMIT_S)
            made.tensors |= kept.tensors | share.place(part, kept.tensors)
            made.folds |= kept.folds or {}
            made.reports += kept.reports
        if context.parallel_layout.stage < pp - 1:
            share.leave()
        return made

    every = run_stages(tp, pp, of_rank)
    made = Quantized()
    for first in every[::tp]:
        made.tensors |= first.tensors
        made.folds |= first.folds
        made.reports += first.reports
    return made
