"""Compose a RunConfig from the arguments of a Python API."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.errors import UserError, list_known_names
from conf.schema import RunConfig
from conf.tasks import PredictConfig


def compose_run(
    model: str | Path,
    choices: dict[str, str],
    dtype: Any,
    tokenizer: str | Path | None,
    overrides: list[str],
    texts: Mapping[str, str] | None = None,
) -> RunConfig:
    """Return the config of these options, which are keyed by config group. `texts`: as for `compose_run_config`.

    The other arguments and the UserErrors are the same as for `pipeline`.
    """
    from conf.compose import (  # here, so that an engine can be built where Hydra is not installed
        compose_run_config,
        options,
    )

    if not isinstance(model, str | Path):
        raise UserError(f"model is of type {type(model).__name__}, not a path: give a folder, a hub id or an option")
    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r} is one text: give a list of texts")
    for group, choice in choices.items():
        if choice not in options(group):
            raise UserError(f"{group}={choice} does not exist: {list_known_names(options(group), choice)}")
    path = None if str(model) in options("model") else str(model)
    if path is not None and "/" not in path and not Path(path).exists():
        raise UserError(
            f"model={path} is neither a folder or file nor an option: {list_known_names(options('model'), path)}"
        )
    names = [f"{group}={choice}" for group, choice in choices.items()] + ([] if path else [f"model={model}"])
    names += [] if dtype is None else [f"model.dtype={str(dtype).removeprefix('torch.')}"]
    paths = {"model.path": path, "model.tokenizer": _tokenizer_path(tokenizer)}
    argument_texts = {key: text for key, text in paths.items() if text is not None} | dict(texts or {})
    for override in overrides:
        if override.partition("=")[0] in argument_texts:
            raise UserError(f"{override} is given by an argument, too: leave one of them out")
    run = compose_run_config([*names, *overrides], argument_texts)
    for name in ("output_file", "export"):
        if getattr(run.predict, name) != getattr(PredictConfig(), name):
            raise UserError(f"predict.{name} is of jobs, which run.py runs: leave it out")
    return run


def _tokenizer_path(tokenizer: Any) -> str | None:
    if not isinstance(tokenizer, str | Path | None):
        remedy = "give the folder of its files, or leave it out for the model's own"
        raise UserError(f"tokenizer is of type {type(tokenizer).__name__}, not a path: {remedy}")
    return None if tokenizer is None else str(tokenizer)
