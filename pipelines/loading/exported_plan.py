"""Stages 2 and 3 of loading an engine for a model that `task=export` wrote: plan it, and reduce the plan to a rank's part.

An export is of one device, one quantisation and one parallel layout. Other settings are refused.
"""

from dataclasses import replace
from pathlib import Path

import torch

from conf.errors import UserError
from conf.quantization import Activations, QuantConfig
from conf.schema import ModelConfig, ParallelMode
from kernels.collectives import Group, Neighbours
from models.exported.description import REMEDY, Description, part_folder, read_description
from models.exported.model import ExportedLM
from models.heads import HeadKind
from models.sharding import ParallelLayout
from pipelines.loading.fingerprint import plain_quant
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.model_source import ModelSource
from quantization.linear import quantized_if_many


def plan_exported(
    options: ModelConfig, quant: QuantConfig, source: ModelSource, description: Description, device: torch.device
) -> ModelPlan:
    """Return the plan of an exported model.

    Raises UserError if the options contradict the export.
    """
    folder = source.checkpoint.path
    if device.type != "cpu":
        raise UserError(f"device={device.type} does not run {folder}, which is packed for a CPU: give device=cpu")
    requested = replace(quant, activations=quant.activations.in_files)
    if requested != QuantConfig() and plain_quant(requested) != description.quant:
        raise UserError(f"quant contradicts {folder}, which was exported with its own: leave quant out")
    model = ExportedLM(
        description, part_folder(folder, description.parallel_layout), source.architecture.head is not HeadKind.none
    ).eval()
    if quant.activations is Activations.auto:
        model.quantize_rows = quantized_if_many
    return ModelPlan(source, model, [], (), description.dtype, device, options, quant, True, None, 0)


def shard_exported(plan: ModelPlan, parallel_layout: ParallelLayout, group: Group, neighbours: Neighbours) -> ModelPlan:
    """Return the plan of the rank's part, which was exported separately. Arguments: as for `shard_plan`.

    Raises UserError if the rank has other windows than rank 0, which releases the blocks of all ranks.
    """
    assert isinstance(plan.model, ExportedLM)
    folder = plan.source.checkpoint.path
    description = read_description(folder, parallel_layout.rank)
    if description.windows != plan.model.description.windows:
        raise UserError(f"{folder} is damaged (rank {parallel_layout.rank} has other windows than rank 0): {REMEDY}")
    has_head = plan.source.architecture.head is not HeadKind.none
    model = ExportedLM(description, part_folder(folder, parallel_layout), has_head, group, neighbours).eval()
    model.quantize_rows = plan.model.quantize_rows
    return replace(plan, model=model, parallel_layout=parallel_layout)


def check_mode(source: ModelSource, mode: ParallelMode) -> None:
    """Raise UserError if `source` is an exported model that does not run in this mode."""
    if source.exported is None:
        return
    folder = source.checkpoint.path
    if source.exported.part is None and mode is not ParallelMode.single:
        raise UserError(f"parallel={mode.name} does not run {folder}, whose graph is of one process: leave it out")
    if source.exported.part is not None and not mode.divides:
        raise UserError(f"parallel={mode.name} does not run {folder}, {_ranks_of(source.exported.parallel_layout)}")


def _ranks_of(parallel_layout: ParallelLayout) -> str:
    """Return the end of an error message: the exported layout, and the options that run it."""
    tp, pp = parallel_layout.tp, parallel_layout.pp
    mode = "tp" if pp == 1 else "pp" if tp == 1 else "tp_pp"
    options = " ".join(f"parallel.{name}={number}" for name, number in (("tp", tp), ("pp", pp)) if number > 1)
    return f"which was exported for tp={tp} and pp={pp}: give parallel={mode} {options}"


def check_exported_layout(folder: Path, exported: ParallelLayout, parallel_layout: ParallelLayout) -> None:
    """Raise UserError if the model in `folder`, of the layout `exported`, does not run in `parallel_layout`."""
    if (parallel_layout.tp, parallel_layout.pp) != (exported.tp, exported.pp):
        raise UserError(
            f"tp={parallel_layout.tp} and pp={parallel_layout.pp} do not run {folder}, {_ranks_of(exported)}"
        )
    if parallel_layout.adds or parallel_layout.whole_experts:
        option = "parallel.sum=reduce" if parallel_layout.adds else "parallel.experts=whole"
        raise UserError(f"{option} contradicts {folder}, which was exported for ranks that join pieces: leave it out")
