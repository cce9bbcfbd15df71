"""The files of an export: graphs, packed weights and the description of each part, and the runner's tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from conf.errors import UserError, shortened
from models.adapters import adaptable_layers
from models.batch import KVCache
from models.causal_lm import CausalLM
from models.exported.describe import describe, describe_layout
from models.exported.description import ADAPTED_GRAPH, EXPORT, GRAPH, WEIGHTS, part_folder, sha256_of
from models.exported.trace import Traced, trace
from models.formats.huggingface_writer import write_companions
from models.formats.safetensors_writer import save_tensors
from models.layers.lora_target import LoRATarget
from models.tokenizers import load_tokenizer
from models.tokenizers.runner_form import RUNNER_TOKENIZER
from pipelines.loading.model_plan import ModelPlan
from pipelines.tasks.export_parts import AS_IT_IS, NOT_TAKEN, ShardExport
from quantization.smoothing_record import copy_folds


def write_export(
    folder: Path, plan: ModelPlan, parts: list[ShardExport], quant: dict[str, Any], eos: frozenset[int]
) -> str | None:
    """Write all files of an export but its manifest. Return why the runner takes no texts; None if it does.

    `plan`: the plan of the whole model. `quant`: the options of quantisation, as JSON.
    """
    for part in parts:
        _write_part(part, part_folder(folder, part.parallel_layout), quant, eos)
    if len(parts) > 1:
        layout = parts[0].parallel_layout
        description = describe_layout(folder, layout.tp, layout.pp)
        (folder / EXPORT).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    checkpoint = plan.source.checkpoint
    write_companions(checkpoint, folder, plan.dtype)
    refused = _write_runner_tokenizer(folder) if len(parts) == 1 else None
    copy_folds(checkpoint.path, folder, plan.model)
    return refused


def _write_part(part: ShardExport, folder: Path, quant: dict[str, Any], eos: frozenset[int]) -> None:
    model, cache, names = part.model, part.cache, dict[object, str]()
    traced = [_traced(model, cache, names, layers) for layers in (None, [*adaptable_layers(model).values()])]
    weights = [graph.weights for graph in traced]
    folder.mkdir(exist_ok=True)
    save_tensors(folder / WEIGHTS, weights[0] | weights[1], {})
    for graph, file in zip(traced, (GRAPH, ADAPTED_GRAPH), strict=True):
        torch.export.save(graph.program, folder / file)
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
