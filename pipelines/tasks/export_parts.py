"""The parts of an export, one for each rank: load the parts, and verify that their files give the same bits."""

from dataclasses import dataclass
from pathlib import Path

from conf.errors import UserError
from kernels.collectives.nodes import Recordable
from models.batch import KVCache
from models.causal_lm import CausalLM
from models.exported.description import part_folder, read_description
from models.exported.model import ExportedLM
from models.sharding import ParallelLayout
from pipelines.engine.kv_cache import allocate_kv_cache
from pipelines.loading.cache_allocation import cache_formats
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.planning import plan_model
from pipelines.loading.shard_plan import shard_plan
from pipelines.loading.weight_loading import load_planned
from pipelines.ranks.threads import ThreadRankContext, run_ranks
from pipelines.tasks.export_steps import BLOCK_SIZE, NUM_BLOCKS, NUM_STATE_SLOTS, Results, Steps, differing

NOT_TAKEN, AS_IT_IS = "task=export does not take this model", "run it as it is"


@dataclass(frozen=True)
class ShardExport:
    """A model, or a rank's shard, with its KV cache and the results of the steps that verify its graph."""

    parallel_layout: ParallelLayout
    model: CausalLM
    cache: KVCache
    results: Results


def load_parts(plan: ModelPlan, tp: int, pp: int, steps: Steps) -> list[ShardExport]:
    """Load the model, or the shard of each rank, and compute the steps with it.

    Raises UserError if one bit of the ranks' results differs from the results of one process.
    """
    if tp * pp == 1:
        return [_loaded(plan, steps)]

    def planned() -> ModelPlan:
        return plan_model(plan.options, plan.quant, plan.source, plan.device, packed=True)

    def part(context: ThreadRankContext) -> ShardExport:
        rank_plan = shard_plan(planned(), context.parallel_layout, Recordable(context.group), context.neighbours)
        return _loaded(rank_plan, steps)

    expected = _loaded(planned(), steps).results.outputs
    parts = run_ranks(tp, pp, part)
    number = differing(expected, parts[-tp].results.outputs)  # from the first rank of the last stage
    if number is not None:
        problem = f"result {number} of {len(expected)} differs from one process's result"
        raise UserError(f"{NOT_TAKEN} with tp={tp} and pp={pp} ({problem}): {AS_IT_IS}")
    return parts


def _loaded(plan: ModelPlan, steps: Steps) -> ShardExport:
    load_planned(plan)
    counts, settings = (NUM_STATE_SLOTS, NUM_BLOCKS), (cache_formats(plan), plan.dtype, plan.device)
    cache = allocate_kv_cache(plan.model.layer_caches, NUM_BLOCKS, BLOCK_SIZE, *settings, *counts)
    results = steps.results(plan.model, cache)  # also fills the tables that the model computes once
    return ShardExport(plan.parallel_layout, plan.model, cache, results)


def prove(folder: Path, parts: list[ShardExport], steps: Steps) -> list[ExportedLM]:
    """Load the models from the files in `folder`, compute the steps, and return the models.

    Raises UserError if a model fails, and if one bit of its results differs from the results in `parts`.
    """
    tp, pp = parts[0].parallel_layout.tp, parts[0].parallel_layout.pp

    def load_and_run(context: ThreadRankContext) -> tuple[ExportedLM, Results]:
        rank = context.parallel_layout.rank
        rank_folder, group = part_folder(folder, context.parallel_layout), context.group if len(parts) > 1 else None
        exported = ExportedLM(read_description(folder, rank), rank_folder, True, group, context.neighbours)
        exported.load()
        return exported, steps.results(exported, parts[rank].cache)

    try:
        models = run_ranks(tp, pp, load_and_run)
    except UserError as error:
        raise UserError(f"{NOT_TAKEN} ({error.__cause__ or error}): {AS_IT_IS}") from error
    for part, (_, results) in zip(parts, models, strict=True):
        expected, actual = ([*rank_results.outputs, *rank_results.stored] for rank_results in (part.results, results))
        if (number := differing(expected, actual)) is not None:
            raise UserError(
                f"{NOT_TAKEN} (its graph differs from it in result {number} of {len(expected)}): {AS_IT_IS}"
            )
    return [exported for exported, _ in models]
