"""The config of a run in its config.yaml, which can be run again alone and from any folder."""

import os
from dataclasses import replace
from typing import Any

from conf.cache_tiers import with_absolute_folders
from conf.schema import ModelConfig, RunConfig
from conf.tasks import SweepConfig


def as_saved(run: RunConfig) -> RunConfig:
    """Return the run with absolute paths, without a folder to resume and without sweep settings.

    Hub ids and prompts stay unchanged.
    """
    model, predict, prefix = _with_revision_in_path(run.model), run.predict, run.prefix
    model_paths: dict[str, Any] = {key: _existing(getattr(model, key)) for key in ("path", "tokenizer")}
    for key in ("prefixes", "adapters"):
        model_paths[key] = getattr(model, key) and {name: _existing(path) for name, path in getattr(model, key).items()}
    resume = "none" if predict.resume == "none" else "auto"
    predict_paths: dict[str, Any] = {
        "data": _data(predict.data),
        "chat_template": _template(predict.chat_template),
        "resume": resume,
    }
    prefix_paths: dict[str, Any] = {"data": _data(prefix.data), "chat_template": _template(prefix.chat_template)}
    evaluate_paths: dict[str, Any] = {
        key: _existing(getattr(run.evaluate, key))
        for key in ("data", "questions", "reference", "tasks_folder", "against")
    }
    serve, quant, decode, convert = run.serve, run.quant, run.decode, run.convert
    convert_paths: dict[str, Any] = {key: _given(getattr(convert, key)) for key in ("output", "lora", "imatrix")}
    speculation = replace(decode.speculation, model_path=_existing(decode.speculation.model_path))
    serve_paths: dict[str, Any] = {key: _given(getattr(serve, key)) for key in ("api_keys", "admin_keys", "batches")}
    serve_paths["adapter_folders"] = [_absolute(folder) for folder in serve.adapter_folders]
    return replace(
        run,
        model=replace(model, **model_paths),
        quant=replace(quant, plan=_existing(quant.plan), imatrix=_existing(quant.imatrix)),
        decode=replace(decode, speculation=speculation),
        device=replace(
            run.device,
            kept_prefixes=[_absolute(path) for path in run.device.kept_prefixes],
            kv_cache_tiers=with_absolute_folders(run.device.kv_cache_tiers),
        ),
        predict=replace(predict, **predict_paths),
        bench=replace(run.bench, data=_existing(run.bench.data)),
        evaluate=replace(run.evaluate, **evaluate_paths),
        convert=replace(convert, **convert_paths),
        export=replace(run.export, output=_given(run.export.output)),
        quantize=replace(run.quantize, output=_given(run.quantize.output)),
        prefix=replace(prefix, output=_given(prefix.output), **prefix_paths),
        calibrate=replace(run.calibrate, data=_existing(run.calibrate.data)),
        serve=replace(serve, chat_template=_template(serve.chat_template), **serve_paths),
        verify=replace(run.verify, folder=_given(run.verify.folder)),
        tracker=run.tracker.saved,
        sweep=SweepConfig(),
    )


def _with_revision_in_path(model: ModelConfig) -> ModelConfig:
    """Return the settings with `org/name@REVISION`, so that another model.path of a later run has no revision."""
    if model.revision is None or "@" in model.path or _is_on_disk(model.path):
        return model
    tokenizer = model.tokenizer
    if tokenizer and "@" not in tokenizer and not _is_on_disk(tokenizer):
        tokenizer = f"{tokenizer}@{model.revision}"
    return replace(model, path=f"{model.path}@{model.revision}", tokenizer=tokenizer, revision=None)


def _is_on_disk(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _given(path: str | None) -> str | None:
    """Return the absolute path, also if it does not exist yet."""
    return path and _absolute(path)


def _existing(path: str | None) -> str | None:
    """Return the absolute path if it exists. A hub id, none and null stay unchanged."""
    return _absolute(path) if path and path != "none" and _is_on_disk(path) else path


def _data(data: str | None) -> str | None:
    """Return the absolute path of a file. A prompt and - stay unchanged."""
    return _absolute(data) if data and data != "-" and os.path.isfile(os.path.expanduser(data)) else data


def _template(template: str) -> str:
    return template if template in ("auto", "none") else _absolute(template)
