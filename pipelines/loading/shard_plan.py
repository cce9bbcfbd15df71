"""Stage 3 of loading an engine: reduce the plan of the whole model to one rank's shard. Reads no weights."""

from dataclasses import replace

from conf.errors import UserError
from conf.schema import ParallelMode
from kernels.collectives import NO_NEIGHBOURS, Group, Neighbours
from models.exported.description import part_folder, read_description
from models.exported.model import ExportedLM
from models.formats.sliced import sliced_files
from models.heads import HeadKind
from models.parallel import check_division, shard_model
from models.sharding import ParallelLayout
from models.weights import match_tensors
from pipelines.loading.model_source import ModelSource
from pipelines.loading.planning import ModelPlan


def check_mode(source: ModelSource, mode: ParallelMode) -> None:
    """Raise UserError if `source` is an exported model that does not run in this mode."""
    if source.artefact is None:
        return
    folder = source.checkpoint.path
    if source.artefact.part is None and mode is not ParallelMode.single:
        raise UserError(f"parallel={mode.name} does not run {folder}, whose graph is of one process: leave it out")
    if source.artefact.part is not None and not mode.divides:
        raise UserError(f"parallel={mode.name} does not run {folder}, {_ranks_of(source.artefact.parallel_layout)}")


def _ranks_of(parallel_layout: ParallelLayout) -> str:
    """Return the end of an error message: the exported layout, and the options that run it."""
    tp, pp = parallel_layout.tp, parallel_layout.pp
    mode = "tp" if pp == 1 else "pp" if tp == 1 else "tp_pp"
    given = " ".join(f"parallel.{name}={number}" for name, number in (("tp", tp), ("pp", pp)) if number > 1)
    return f"which was exported for tp={tp} and pp={pp}: give parallel={mode} {given}"


def shard_plan(
    plan: ModelPlan, parallel_layout: ParallelLayout, group: Group, neighbours: Neighbours = NO_NEIGHBOURS
) -> ModelPlan:
    """Return the plan of one rank's shard. `plan` is the plan of the whole model; its model is sharded in place.

    Raises UserError if the files do not match the whole model, and as `check_plan` and `shard_model` do.
    """
    if parallel_layout == ParallelLayout():
        return plan
    check_plan(plan, parallel_layout)
    if isinstance(plan.model, ExportedLM):
        whole, folder = plan.model, plan.source.checkpoint.path
        own = read_description(folder, parallel_layout.rank)
        has_head = plan.source.architecture.head is not HeadKind.none
        model = ExportedLM(own, part_folder(folder, parallel_layout), has_head, group, neighbours).eval()
        model.quantized = whole.quantized
        return replace(plan, model=model, parallel_layout=parallel_layout)
    matched = match_tensors(plan.model, plan.files, plan.ignored_tensors)
    shards = shard_model(plan.model, parallel_layout, group, plan.dtype, neighbours)
    files = sliced_files(plan.files, matched, plan.model, shards, parallel_layout)
    return replace(plan, files=files, parallel_layout=parallel_layout, whole_files=tuple(plan.files), shards=shards)


def check_plan(plan: ModelPlan, parallel_layout: ParallelLayout) -> None:
    """Raise UserError if the model cannot be sharded in this layout, or if it was exported for another layout.

    The driver calls it before it starts the worker ranks.
    """
    artefact = plan.source.artefact
    if artefact is None:
        if not plan.files:
            raise UserError(
                "model.weights=random makes other weights in parts than whole: give a checkpoint, or parallel=single"
            )
        check_division(plan.model, parallel_layout, plan.dtype)
        return
    folder, exported = plan.source.checkpoint.path, artefact.parallel_layout
    if (parallel_layout.tp, parallel_layout.pp) != (exported.tp, exported.pp):
        raise UserError(
            f"tp={parallel_layout.tp} and pp={parallel_layout.pp} do not run {folder}, {_ranks_of(exported)}"
        )
    if parallel_layout.adds or parallel_layout.whole_experts:
        given = "parallel.sum=reduce" if parallel_layout.adds else "parallel.experts=whole"
        raise UserError(f"{given} contradicts {folder}, which was exported for ranks that join pieces: leave it out")
