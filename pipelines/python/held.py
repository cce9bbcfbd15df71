"""Models and tokenizers that a script already has in memory and passes instead of paths."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.schema import ModelConfig, RunConfig, Weights
from models.formats import open_tokenizer
from models.formats.hub import find_checkpoint
from models.formats.in_memory import name_of, open_in_memory
from models.heads import HeadKind
from models.tokenizers import Tokenizer
from models.tokenizers.in_memory import tokenizer_in_memory
from pipelines.loading.model_source import ModelSource, OpenModel, resolve_model, source_of
from pipelines.python.composing import compose_run


def is_held(model_or_tokenizer: Any) -> bool:
    return not isinstance(model_or_tokenizer, str | Path | None)


def compose_held(
    model: Any, choices: dict[str, str], dtype: Any, tokenizer: Any, overrides: list[str]
) -> tuple[RunConfig, OpenModel]:
    """Return the config of a model and a tokenizer, one or both of which are objects, and their opener.

    `model`: a path, an option of conf/model or a PreTrainedModel of transformers. `tokenizer`: a path, None, a
    PreTrainedTokenizerBase of transformers or a pipeline's tokenizer. Raises UserError for another object, and for
    settings that need files.
    """
    if is_held(model) and not _is_of_transformers(model, "PreTrainedModel"):
        raise UserError(
            f"model is of type {type(model).__name__}: give a folder, a hub id, an option or a PreTrainedModel of transformers "
            "(of PEFT, its merge_and_unload())"
        )
    is_tokenizer = isinstance(tokenizer, Tokenizer) or _is_of_transformers(tokenizer, "PreTrainedTokenizerBase")
    if is_held(tokenizer) and not is_tokenizer:
        remedy = "give the folder of its files, or leave it out for the model's own"
        raise UserError(f"tokenizer is of type {type(tokenizer).__name__}, not a path or a tokenizer: {remedy}")
    path = None if is_held(tokenizer) else tokenizer
    if is_held(model):
        run = compose_run("tiny", choices, dtype, path, overrides, {"model.path": name_of(model)})
    else:
        run = compose_run(model, choices, dtype, path, overrides)
    _refuse_files(run, model)
    return run, partial(_open, run.model, model, tokenizer)


def _is_of_transformers(held_object: Any, name: str) -> bool:
    """Return whether the object has this class of transformers. transformers is not imported: if the object has this
    class, the script has imported it.
    """
    return any(
        base.__name__ == name and base.__module__.startswith("transformers.") for base in type(held_object).__mro__
    )


def _refuse_files(run: RunConfig, model: Any) -> None:
    saved = "save_pretrained it, and give the folder"
    if run.quant.needs_calibration:
        raise UserError(f"quant={run.quant.scheme.name} calibrates a model from its files: {saved}")
    if not is_held(model):
        return
    refused = {
        f"parallel={run.parallel.mode.name}": run.parallel.mode.divides,
        "model.weights=random": run.model.weights is Weights.random,
        "model.verify=true": run.model.verify,
        "model.keep_packed=true": run.model.keep_packed,
        "model.revision": run.model.revision is not None,
        "device.kept_prefixes": bool(run.device.kept_prefixes),
        "device.kv_cache_tiers": bool(run.device.kv_cache_tiers),
    }
    for setting, is_given in refused.items():
        if is_given:
            raise UserError(f"{setting} is of a model's files, and {type(model).__name__} is in memory: {saved}")


def _open(config: ModelConfig, model: Any, tokenizer: Any, head: HeadKind | None) -> ModelSource:
    if is_held(model):
        checkpoint = open_in_memory(model, partial(_own_tokenizer, config))
        source = source_of(config, checkpoint, head)
    else:
        source = resolve_model(config, head)
    if not is_held(tokenizer):
        return source
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = tokenizer_in_memory(tokenizer, source.checkpoint.config.values)
    return replace(source, checkpoint=replace(source.checkpoint, load_tokenizer=lambda: tokenizer))


def _own_tokenizer(model: ModelConfig) -> Tokenizer | None:
    if "/" not in model.path and not Path(model.path).exists():  # the model's class name
        return None
    return open_tokenizer(find_checkpoint(model.path, False, False, model.hub))
