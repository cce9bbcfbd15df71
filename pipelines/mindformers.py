"""The API of MindFormers: its scripts run with imports from `pipelines.mindformers`.

`build_context`, `AutoModel`, `AutoTokenizer`, `pipeline` and the streamers have MindFormers' names and arguments (docs
of MindFormers 1.3 to 1.5, "Inference"). A model and a tokenizer are descriptions, which `pipeline` opens.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import UserError, list_known_names
from models.formats import open_tokenizer
from pipelines.python import factory
from pipelines.python.pooled_pipeline import PooledPipeline
from pipelines.python.streamers import TextIteratorStreamer, TextStreamer
from pipelines.python.text_pipeline import TextGenerationPipeline

__all__ = ["AutoModel", "AutoTokenizer", "TextIteratorStreamer", "TextStreamer", "build_context", "pipeline"]

log = logging.getLogger(__name__)

DEVICES = {"CPU": "cpu", "GPU": "cuda"}
"""Values of context.device_target, and of our device setting."""
SIZES = {"model_parallel": "tp", "pipeline_stage": "pp"}
"""Keys of parallel_config, and of our parallel settings."""
SETTINGS = {"seq_length": "model.max_length", "batch_size": "predict.batch_size", "block_size": "device.block_size"}
"""Keys of a model's config that correspond to our settings."""
GENERATION = {"max_decode_length": "max_length"} | {
    name: name
    for name in ("max_length", "max_new_tokens", "do_sample", "top_k", "top_p", "temperature", "repetition_penalty")
}
"""Keys of a model's config that are defaults of each call, and the arguments of the call."""
UNUSED = (
    "use_past",
    "is_dynamic",
    "use_flash_attention",
    "use_paged_attention",
    "qkv_concat",
    "use_fast",
    "padding_side",
    "trust_remote_code",
)
"""Keys of a model and a tokenizer without effect: the cache is always paged, and a checkpoint's code is never run."""

_context: list[str] = []  # overrides of the last build_context, which scripts do not pass on


@dataclass(frozen=True)
class Description:
    """A model or a tokenizer by name, which `pipeline` opens."""

    name: str
    """An option of conf/model, a folder or a hub id."""
    checkpoint: str | None = None
    """The folder of the weights, if it is not the folder of the name."""
    overrides: list[str] = field(default_factory=list)
    dtype: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """Default arguments of each call."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: a model or tokenizer of pipelines.mindformers is opened by pipeline(...) alone")


def build_context(config: Mapping[str, Any]) -> None:
    """Set the device and the number of ranks of the pipelines that are created next.

    These keys of `config` have an effect: context.device_target, use_parallel, run_mode, parallel.device_num, and
    model_parallel and pipeline_stage of parallel_config. One warning names all other keys. Raises UserError for a
    run_mode other than predict, and for sizes that contradict each other.
    """
    if not isinstance(config, Mapping):
        raise UserError(
            f"build_context takes a dictionary, not a {type(config).__name__}: give context and parallel_config"
        )
    mode = config.get("run_mode", "predict")
    if mode != "predict":
        raise UserError(f"run_mode={mode!r} is not here: models are run, and not trained; give predict")
    sections = {name: config.get(name) or {} for name in ("context", "parallel_config", "parallel")}
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise UserError(f"{name} of build_context is of type {type(section).__name__}: give a dictionary")
    context, sizes, parallel = map(dict, sections.values())
    target = context.pop("device_target", None)
    if target not in (None, "Ascend", *DEVICES):
        raise UserError(
            f"context.device_target={target!r} does not exist: {list_known_names([*DEVICES, 'Ascend'], str(target))}"
        )
    if target == "Ascend":
        log.warning("context.device_target=Ascend is not here: what runs is a GPU if there is one, else the CPU")
    overrides = [f"device={DEVICES[target]}"] if target in DEVICES else []
    use_parallel = config.get("use_parallel", False)
    if not isinstance(use_parallel, bool):
        raise UserError(f"use_parallel={use_parallel!r} is not allowed: give True or False")
    overrides += _ranks(use_parallel, sizes, parallel.pop("device_num", None))
    if context.get("mode") == 0:  # graph mode, as steps are captured here
        del context["mode"]
    sections = {"context": context, "parallel_config": sizes, "parallel": parallel}
    unused = [f"{section}.{key}" for section, settings in sections.items() for key in settings]
    if unused := unused + [key for key in config if key not in (*sections, "use_parallel", "run_mode")]:
        log.warning("build_context: %s change nothing: they set up MindSpore", ", ".join(unused))
    _context[:] = overrides


def _ranks(use_parallel: bool, sizes: dict[str, Any], num_devices: int | None) -> list[str]:
    """Remove the rank counts from `sizes`, and return them as overrides.

    Raises UserError if they contradict each other.
    """
    sizes_by_name = {name: sizes.pop(name, 1) for name in ("data_parallel", *SIZES)}
    for name, size in sizes_by_name.items():
        if type(size) is not int or size < 1:
            raise UserError(f"parallel_config.{name}={size!r} is not allowed: give a number above 0")
    parallel_sizes = {name: size for name, size in sizes_by_name.items() if size > 1}
    if not use_parallel:
        if parallel_sizes:
            log.warning("parallel_config: %s is used with use_parallel=True alone", ", ".join(parallel_sizes))
        return []
    if sizes_by_name["data_parallel"] > 1:
        size = sizes_by_name["data_parallel"]
        remedy = f"give 1, or run.py parallel=ray parallel.replicas={size}"
        raise UserError(f"parallel_config.data_parallel={size} are engines of their own: {remedy}")
    ranks = sizes_by_name["model_parallel"] * sizes_by_name["pipeline_stage"]
    if num_devices not in (None, ranks):
        raise UserError(f"parallel.device_num={num_devices} contradicts parallel_config, which has {ranks} ranks")
    chosen = {SIZES[name]: size for name, size in parallel_sizes.items()}
    if not chosen:
        return []
    return [f"parallel={'_'.join(chosen)}", *(f"parallel.{name}={size}" for name, size in chosen.items())]


class AutoModel:
    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_dir: str | Path, checkpoint_name_or_path: str | Path | None = None, **settings: Any
    ) -> Description:
        """Describe a model: an option of conf/model such as llama2_7b, a folder or a hub id.

        `checkpoint_name_or_path`: the folder of its weights, or the `.ckpt` in that folder. `settings`: keys of
        MindFormers' model config. Raises UserError for keys of the architecture, which comes from the checkpoint, and
        for unknown keys.
        """
        path = None if checkpoint_name_or_path is None else str(_folder(Path(checkpoint_name_or_path)))
        dtype = settings.pop("compute_dtype", None)
        overrides = [
            f"{SETTINGS[name]}={value}" for name, value in settings.items() if name in SETTINGS and value is not None
        ]
        arguments = {
            GENERATION[name]: value for name, value in settings.items() if name in GENERATION and value is not None
        }
        _refuse_others({name: value for name, value in settings.items() if name not in {*SETTINGS, *GENERATION}})
        name = str(pretrained_model_name_or_dir)
        return Description(name, path, overrides, None if dtype is None else str(dtype).lower(), arguments)


class AutoTokenizer:
    """MindFormers' AutoTokenizer."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_dir: str | Path, **settings: Any) -> Description:
        """Describe the tokenizer of an option of conf/model, a folder or a hub id.

        Raises UserError for settings of its files.
        """
        _refuse_others(settings)
        return Description(str(pretrained_model_name_or_dir))


def pipeline(
    task: str | None = None,
    model: "Description | str | Path | Any" = None,
    tokenizer: "Description | str | Path | Any" = None,
    image_processor: None = None,
    audio_processor: None = None,
    backend: str = "ms",
    **arguments: Any,
) -> TextGenerationPipeline | PooledPipeline:
    """Return our pipeline of a model, with the device and ranks of `build_context`.

    `arguments`: settings of the model if it is a name, defaults of each call, and arguments of our `pipeline`. If the
    tokenizer has the model's name, the tokenizer in the folder of the weights is used if there is one. Raises UserError
    as our `pipeline` does.
    """
    if task is None or model is None:
        raise UserError(
            "pipeline needs a task and a model: give task='text_generation' and model=AutoModel.from_pretrained(...)"
        )
    for name, processor in (("image_processor", image_processor), ("audio_processor", audio_processor)):
        if processor is not None:
            raise UserError(f"{name} is not used: prompts are texts alone; leave it out")
    if backend != "ms":
        raise UserError(f"backend={backend!r} is not here: leave it out")
    if isinstance(model, str | Path):
        model_arguments = {
            name: arguments.pop(name)
            for name in [*arguments]
            if name in (*SETTINGS, *UNUSED, "checkpoint_name_or_path")
        }
        model = AutoModel.from_pretrained(model, **model_arguments)
    overrides = [*_context, *arguments.pop("overrides", ())]
    if not isinstance(model, Description):
        return factory.pipeline(task, model, tokenizer=_opened(tokenizer, None), overrides=overrides, **arguments)
    from conf.compose import options  # here, so that an engine can be built where Hydra is not installed

    if model.checkpoint and model.name not in options("model") and not Path(model.name).exists():
        raise UserError(f"model {model.name} does not exist: {list_known_names(options('model'), model.name)}")
    return factory.pipeline(
        task,
        model.checkpoint or model.name,
        dtype=arguments.pop("dtype", model.dtype),
        tokenizer=_opened(tokenizer, model),
        overrides=[*model.overrides, *overrides],
        **{**model.arguments, **arguments},
    )


def _opened(tokenizer: Any, model: Description | None) -> Any:
    if not isinstance(tokenizer, Description):
        return tokenizer
    from conf.compose import (  # here, so that an engine can be built where Hydra is not installed
        compose_run_config,
        options,
    )

    if model and tokenizer.name == model.name:
        model_tokenizer = open_tokenizer(Path(model.checkpoint).expanduser()) if model.checkpoint else None
        if model_tokenizer is not None or model.checkpoint is None:
            return model_tokenizer
    if tokenizer.name in options("model"):
        return compose_run_config([f"model={tokenizer.name}"]).model.path
    return tokenizer.name


def _folder(path: Path) -> Path:
    """Return the folder of a `.ckpt`. Raises UserError if the folder has more `.ckpt` files."""
    if path.suffix != ".ckpt" or path.is_dir():
        return path
    folder = path.parent
    other_files = sorted(file.name for file in folder.glob("*.ckpt") if file.name != path.name)
    if other_files or not path.is_file():
        problem = f"{folder} also has {', '.join(other_files[:4])}" if path.is_file() else "there is no such file"
        raise UserError(
            f"checkpoint_name_or_path={path}: {problem}: give a folder with the one checkpoint and its config"
        )
    return folder


def _refuse_others(settings: dict[str, Any]) -> None:
    """Raise UserError for settings of the checkpoint's files, and warn of settings without effect."""
    for name, value in settings.items():
        if name not in UNUSED:
            remedy = "leave it out, or change a copy of its folder"
            raise UserError(f"{name}={value!r} is not taken: config and tokenizer are the checkpoint's own; {remedy}")
        if (name, value) != ("use_past", True):
            log.warning("%s=%r changes nothing: the cache is always kept, and the files say the rest", name, value)
