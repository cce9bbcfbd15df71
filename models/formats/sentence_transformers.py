"""Read the embedding settings of a checkpoint: the files that sentence-transformers writes next to the weights."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import UserError, shortened
from models.config import read_json, read_json_value

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "cls"}
NEWER_MODES = {"mean": "mean", "lasttoken": "last", "cls": "cls"}  # values of `pooling_mode` in newer files


@dataclass(frozen=True)
class EmbeddingFiles:
    """The settings in the files; defaults if there are no files."""

    pooling: str | None = None
    """mean, last or cls."""
    normalizes: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts to put before an input, by name."""
    default_prompt: str | None = None
    """Name of the prompt that applies if the request names none."""
    max_tokens: int | None = None
    """Maximum number of tokens of a text, with special tokens; the rest is truncated."""


def read_embedding_files(folder: Path) -> EmbeddingFiles:
    """Read the files in a checkpoint's folder.

    Raises UserError with the name of an unsupported module, pooling or type.
    """
    if not folder.is_dir():  # a GGUF file
        return EmbeddingFiles()
    pooling, normalizes = _read_modules(folder)
    transformer = read_json(folder / TRANSFORMER)
    if transformer.get("do_lower_case") is True:
        raise UserError(
            f"{folder / TRANSFORMER}: do_lower_case=true is not supported: set it to false, and give texts in lower case"
        )
    max_tokens = transformer.get("max_seq_length")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise UserError(
            f"{folder / TRANSFORMER}: max_seq_length={shortened(repr(max_tokens))} is not a number of tokens above 0"
        )
    settings = read_json(folder / PROMPTS)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise UserError(f"{folder / PROMPTS}: prompts are not texts by name")
    if default is not None and default not in list(prompts):
        raise UserError(
            f"{folder / PROMPTS}: default_prompt_name={default!r} is not a name in prompts ({', '.join(prompts) or 'none'})"
        )
    return EmbeddingFiles(pooling, normalizes, prompts, default, max_tokens)


def is_embedding_model(folder: Path) -> bool:
    """Return whether the files in a checkpoint's folder define a pooling."""
    return folder.is_dir() and "Pooling" in _module_kinds(_read_module_list(folder))


def copy_embedding_files(source: Path, folder: Path) -> None:
    """Copy the files of a checkpoint to another folder, with their subfolders."""
    for pattern in (MODULES, PROMPTS, TRANSFORMER, "*_Pooling/config.json"):
        for file in source.glob(pattern):
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def _read_modules(folder: Path) -> tuple[str | None, bool]:
    """Return the pooling (None if no module pools), and whether vectors are normalised."""
    file, modules = folder / MODULES, _read_module_list(folder)
    kinds = _module_kinds(modules)
    if kinds and kinds not in (["Transformer"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{file} has the modules {', '.join(kinds)}: only Transformer, Pooling and Normalize, in this order, are supported"
        )
    if "Pooling" not in kinds:
        return None, False
    path = modules[1].get("path")
    if path not in [entry.name for entry in folder.iterdir()]:
        raise UserError(f"{file}: path={shortened(repr(path))} is not a folder next to it")
    return _read_pooling(folder / path / "config.json"), "Normalize" in kinds


def _read_module_list(folder: Path) -> list[dict[str, Any]]:
    file = folder / MODULES
    modules = read_json_value(file) if file.is_file() else []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UserError(f"{file} is not a list of objects")
    return modules


def _module_kinds(modules: list[dict[str, Any]]) -> list[str]:
    """Return the class names of the modules."""
    return [str(module.get("type", "")).rpartition(".")[2] for module in modules]


def _read_pooling(file: Path) -> str:
    if not file.is_file():
        raise UserError(f"{file} is missing, but {MODULES} names its folder")
    config: dict[str, Any] = read_json(file)
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if (mode := config.get("pooling_mode")) is not None:
        chosen.append(str(mode))
    pooling, *more_modes = {(MODES | NEWER_MODES).get(name) for name in chosen} or {None}
    if pooling is None or more_modes:
        raise UserError(
            f"{file}: the pooling {' + '.join(chosen) or 'none'} is not supported: only one of {', '.join(MODES)}"
        )
    if config.get("include_prompt") is False:
        raise UserError(
            f"{file}: include_prompt=false, which leaves the instruction out of the pooling, is not supported"
        )
    return pooling


def appends_eos(tokenizer: Path) -> bool:
    """Return whether the tokenizer's settings add an EOS after each text.

    transformers 5 does not apply this setting to tokenizer.json.
    """
    return tokenizer.is_dir() and read_json(tokenizer / "tokenizer_config.json").get("add_eos_token") is True
