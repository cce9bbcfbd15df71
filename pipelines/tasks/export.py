"""`task=export`: write a model as its graph and packed weights, which run without the model's code and checkpoint."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conf.errors import UserError, shortened
from conf.quantization import Activations, CalibrateConfig, QuantizeConfig
from conf.schema import DeviceType, ParallelMode, RunConfig, Weights
from kernels.collectives.nodes import Recordable
from models.adapters import adaptable_layers
from models.batch import KVCache
from models.causal_lm import CausalLM
from models.exported.description import (
    ADAPTED_GRAPH,
    EXPORT,
    GRAPH,
    WEIGHTS,
    describe,
    describe_division,
    part_folder,
    read_description,
)
from models.exported.model import ExportedLM
from models.exported.trace import Traced, trace
from models.formats.huggingface_writer import write_companions
from models.formats.manifest import write_manifest
from models.formats.safetensors_writer import save_tensors
from models.layers.lora_target import LoRATarget
from models.sharding import ParallelLayout
from models.tokenizers import load_tokenizer
from models.tokenizers.runner_form import RUNNER_TOKENIZER
from pipelines.engine.kv_cache import allocate_kv_cache
from pipelines.jobs import report
from pipelines.jobs.output_folder import complete_folder, refuse_existing
from pipelines.loading.assembly import cache_formats, load_planned
from pipelines.loading.device import prepare_device
from pipelines.loading.fingerprint import plain_quant, sha256_of
from pipelines.loading.load_engine import calibrated
from pipelines.loading.model_source import moved, resolve_model
from pipelines.loading.planning import ModelPlan, plan_model, shard_plan
from pipelines.loading.request_settings import read_request_settings
from pipelines.ranks.threads import ThreadRankContext, run_ranks
from pipelines.tasks.export_steps import BLOCK_SIZE, NUM_BLOCKS, Results, Steps, differing
from quantization.smoothing_record import copy_folds

NOT_TAKEN, AS_IT_IS = "task=export does not take this model", "run it as it is"


@dataclass(frozen=True)
class _ShardExport:
    """A model, or a rank's shard, with its KV cache and the results of the steps that verify its graph."""

    parallel_layout: ParallelLayout
    model: CausalLM
    cache: KVCache
    results: Results


def run_export(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Export the model. Raises UserError. `export.output` is either complete and verified, or unchanged."""
    _check_settings(run)
    assert run.export.output is not None
    metrics = export_model(run, Path(run.export.output), run.export.overwrite)
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, absolute(run.export.output), output_dir)


def export_model(run: RunConfig, output: Path, overwrite: bool) -> dict[str, Any]:
    """Write the artefact of the run's model to `output`, and return its metrics.

    The artefact appears when it is complete and verified. Raises UserError for a model or a device that cannot be
    exported, and if the artefact's results differ by one bit.
    """
    target = absolute(output)
    refuse_existing(target, overwrite, "export")
    start = time.perf_counter()
    device = prepare_device(run.device)
    if device.type != "cpu":
        raise UserError("task=export packs weights for a CPU: give device=cpu")
    source = resolve_model(run.model)
    if source.artefact is not None:
        raise UserError(f"{run.model.path} is exported already: give the model that it was made of")
    quant = plain_quant(run.quant)
    run, source = calibrated(run, source, report.NO_PROGRESS)
    settings = read_request_settings(run.model, source)
    plan = plan_model(run, source, device, packed=True)
    steps = Steps.of(plan.model)
    parts = _parts(run, plan, steps)
    with complete_folder(target, overwrite, "export") as folder:
        for part in parts:
            _write(part, part_folder(folder, part.parallel_layout), quant, settings.eos_token_ids)
        if len(parts) > 1:
            description = describe_division(folder, run.export.tp, run.export.pp)
            (folder / EXPORT).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        write_companions(source.checkpoint, folder, plan.dtype)
        refused = _write_runner_tokenizer(folder) if len(parts) == 1 else None
        copy_folds(source.checkpoint.path, folder, plan.model)
        exported = _proved(folder, parts, steps)
        write_manifest(folder, {})
    sizes = [file.stat().st_size for file in target.rglob("*") if file.is_file()]
    return {
        "num_nodes": sum(len(each.graph.body) + len(each.graph.head) for each in exported),
        "num_files": len(sizes),
        "bytes_written": sum(sizes),
        "runner_refuses_texts": refused,
        "export_s": time.perf_counter() - start,
        "peak_memory_bytes": report.peak_memory_bytes(device),
    }


def _print(metrics: dict[str, Any], target: Path, output_dir: Path) -> None:
    rows = [
        ("nodes", f"{metrics['num_nodes']:,}"),
        ("written", f"{metrics['bytes_written'] / 1e6:,.1f} MB in {metrics['num_files']} files"),
        ("time", f"{metrics['export_s']:.2f} s"),
    ]
    if refused := metrics["runner_refuses_texts"]:
        rows.append(("runner", f"takes token ids alone, because its tokenizer cannot be used: {refused}"))
    report.print_table(rows)
    print(f"model: {target}")
    print(f"output: {output_dir}")


def absolute(output: str | Path) -> Path:
    return Path(os.path.abspath(Path(output).expanduser()))


def _check_settings(run: RunConfig) -> None:
    if run.export.output is None:
        raise UserError("export.output is missing: give the folder to make")
    run.decode.check_unset("by task=export", "leave it out")
    _check_common(run, "task=export")
    if run.model.max_length is not None:
        raise UserError("model.max_length is not used by task=export: leave it out")
    if run.quant.activations is Activations.auto:
        raise UserError(
            "quant.activations=auto is a choice of each run: leave it out, and give it where the exported model runs"
        )


def _check_common(run: RunConfig, user: str) -> None:
    refused = {
        "model.weights=random": run.model.weights is Weights.random,
        "model.keep_packed=true": run.model.keep_packed,
        f"parallel={run.parallel.mode.name}": run.parallel.mode is not ParallelMode.single,
        "device=cuda": run.device.type is DeviceType.cuda,
    }
    for given, is_given in refused.items():
        if is_given:
            raise UserError(f"{given} is not used by {user}: leave it out")


def run_of_artefact(run: RunConfig, folder: Path, is_made: bool) -> RunConfig:
    """Return the run of `predict.export`, whose model is the artefact at `folder`.

    Exports the model first, unless `is_made`.

    Raises UserError as `export_model` does, and for settings that an artefact does not accept.
    """
    _check_common(run, "predict.export=true")
    made_of = replace(run.model, max_length=None, prefixes=None, adapters=None)
    if not is_made:
        quant, predict = (
            replace(run.quant, activations=run.quant.activations.of_model),
            replace(run.predict, adapter=None),
        )
        export_model(replace(run, model=made_of, quant=quant, predict=predict), folder, overwrite=True)
    model = replace(moved(run.model, folder), verify=False, allow_pickle=False)
    return replace(run, model=model, calibrate=CalibrateConfig(), quantize=QuantizeConfig())


def _parts(run: RunConfig, plan: ModelPlan, steps: Steps) -> list[_ShardExport]:
    """Return the loaded model, or each rank's shard, after the steps.

    Raises UserError if ranks give other bits than one process.
    """
    tp, pp = run.export.tp, run.export.pp
    if tp * pp == 1:
        return [_loaded(run, plan, steps)]

    def planned() -> ModelPlan:
        return plan_model(run, plan.source, plan.device, packed=True)

    def part(context: ThreadRankContext) -> _ShardExport:
        own = shard_plan(planned(), context.parallel_layout, Recordable(context.group), context.neighbours)
        return _loaded(run, own, steps)

    expected = _loaded(run, planned(), steps).results.outputs
    parts = run_ranks(tp, pp, part)
    number = differing(expected, parts[-tp].results.outputs)  # from the first rank of the last stage
    if number is not None:
        what = f"result {number} of {len(expected)} is not that of one process"
        raise UserError(f"{NOT_TAKEN} with tp={tp} and pp={pp} ({what}): {AS_IT_IS}")
    return parts


def _loaded(run: RunConfig, plan: ModelPlan, steps: Steps) -> _ShardExport:
    load_planned(run, plan)
    formats, sizes = cache_formats(run, plan), (NUM_BLOCKS, BLOCK_SIZE)
    cache = allocate_kv_cache(plan.model.attention_heads, *sizes, formats, plan.dtype, plan.device)
    results = steps.results(plan.model, cache)  # also fills caches that the model computes once
    return _ShardExport(plan.parallel_layout, plan.model, cache, results)


def _write(part: _ShardExport, folder: Path, quant: dict[str, Any], eos: frozenset[int]) -> None:
    model, cache, names = part.model, part.cache, dict[object, str]()
    traced = [_traced(model, cache, names, layers) for layers in (None, [*adaptable_layers(model).values()])]
    weights = [each.weights for each in traced]
    folder.mkdir(exist_ok=True)
    save_tensors(folder / WEIGHTS, weights[0] | weights[1], {})
    for each, file in zip(traced, (GRAPH, ADAPTED_GRAPH), strict=True):
        torch.export.save(each.program, folder / file)
    sha256 = {file: sha256_of(folder / file) for file in (GRAPH, ADAPTED_GRAPH)}
    description = describe(
        model, cache, weights, quant, eos, part.results.outputs[0].shape[1], sha256, part.parallel_layout
    )
    (folder / EXPORT).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def _write_runner_tokenizer(folder: Path) -> str | None:
    """Write the tokenizer in the runner's form. If the runner cannot use it, write and return the reason."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        return None
    try:
        form = tokenizer.runner_form()
    except UserError as error:
        form = {"refused": str(error)}
    content = json.dumps(form, ensure_ascii=False, separators=(",", ":"))
    (folder / RUNNER_TOKENIZER).write_text(content + "\n", encoding="utf-8")
    return form.get("refused")


def _traced(model: CausalLM, cache: KVCache, names: dict[object, str], adapted: Sequence[LoRATarget] | None) -> Traced:
    """Trace the model. Raises UserError if its code reads values of tensors, which a graph does not have."""
    try:
        return trace(model, cache, names, adapted)
    except Exception as error:  # from torch, or from the model's code, which gets fake tensors
        reason = shortened(" ".join(str(error).split()))
        raise UserError(f"{NOT_TAKEN} ({type(error).__name__}: {reason}): {AS_IT_IS}") from error


def _proved(folder: Path, parts: list[_ShardExport], steps: Steps) -> list[ExportedLM]:
    """Return the models loaded from the files. Raises UserError if one fails, and if one bit of a result differs."""
    tp, pp = parts[0].parallel_layout.tp, parts[0].parallel_layout.pp

    def found(context: ThreadRankContext) -> tuple[ExportedLM, Results]:
        rank = context.parallel_layout.rank
        own, group = part_folder(folder, context.parallel_layout), context.group if len(parts) > 1 else None
        exported = ExportedLM(read_description(folder, rank), own, True, group, context.neighbours)
        exported.load()
        return exported, steps.results(exported, parts[rank].cache)

    try:
        models = run_ranks(tp, pp, found)
    except UserError as error:
        raise UserError(f"{NOT_TAKEN} ({error.__cause__ or error}): {AS_IT_IS}") from error
    for part, (_, results) in zip(parts, models, strict=True):
        own, others = ([*each.outputs, *each.stored] for each in (part.results, results))
        if (number := differing(own, others)) is not None:
            raise UserError(f"{NOT_TAKEN} (its graph differs from it in result {number} of {len(own)}): {AS_IT_IS}")
    return [exported for exported, _ in models]
