"""Stage 3 of loading an engine: reduce the plan of the whole model to one rank's shard. Reads no weights."""

from dataclasses import replace

from conf.errors import UserError
from kernels.collectives import NO_NEIGHBOURS, Group, Neighbours
from models.formats.sliced import sliced_files
from models.parallel import check_layout, shard_model
from models.sharding import ParallelLayout
from models.weights import match_tensors
from pipelines.loading.exported_plan import check_exported_layout, shard_exported
from pipelines.loading.model_plan import ModelPlan


def shard_plan(
    plan: ModelPlan, parallel_layout: ParallelLayout, group: Group, neighbours: Neighbours = NO_NEIGHBOURS
) -> ModelPlan:
    """Return the plan of one rank's shard. `plan` is the plan of the whole model; its model is sharded in place.

    Raises UserError if the files do not match the whole model, and as `check_plan` and `shard_model` do.
    """
    if parallel_layout == ParallelLayout():
        return plan
    check_plan(plan, parallel_layout)
    if plan.source.exported is not None:
        return shard_exported(plan, parallel_layout, group, neighbours)
    matched = match_tensors(plan.model, plan.files, plan.ignored_tensors)
    shards = shard_model(plan.model, parallel_layout, group, plan.dtype, neighbours)
    files = sliced_files(plan.files, matched, plan.model, shards, parallel_layout)
    return replace(plan, files=files, parallel_layout=parallel_layout, whole_files=tuple(plan.files), shards=shards)


def check_plan(plan: ModelPlan, parallel_layout: ParallelLayout) -> None:
    """Raise UserError if the model cannot be sharded in this layout, or if it was exported for another layout.

    The driver calls it before it starts the worker ranks.
    """
    if plan.source.exported is not None:
        check_exported_layout(plan.source.checkpoint.path, plan.source.exported.parallel_layout, parallel_layout)
        return
    if not plan.files:
        raise UserError(
            "model.weights=random makes other weights in parts than whole: give a checkpoint, or parallel=single"
        )
    check_layout(plan.model, parallel_layout, plan.dtype)
