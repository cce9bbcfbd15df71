"""Merge a LoRA adapter in PEFT's layout into the weights of any checkpoint while they are read (arXiv 2106.09685).

W' = W + s (B A), with s = alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv 2312.03732).

I inputs, O outputs, r rank, V vocabulary, E hidden channels.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.formats.base import WeightFile
from models.formats.huggingface import SafetensorsFile
from models.formats.wrapper import text_name
from models.layers.embedding import Embedding
from models.layers.linear import Linear, tied_embedding
from models.weights import full_names, parameter_shapes

Number = TypeVar("Number", int, float)

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTORS = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.weight)?")
PARAMETER = re.compile(r"(.+?)(\.base_layer)?\.(weight|bias)")
# PEFT reads a pattern as a regular expression. Only names and dots, the common form, are accepted.
PLAIN_PATTERN = re.compile(r"\^?(\w|\\?\.)+")
HEAD = "lm_head"
EMBEDDINGS = ("embed_tokens", HEAD)
# Initialisations that do not change the base weights.
KEEP_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
# Keys of training and bookkeeping. The tensors show which modules are adapted, and a module's class shows its
# fan_in_fan_out, as in PEFT.
TRAINING_KEYS = (
    "auto_mapping base_model_name_or_path corda_config eva_config exclude_modules fan_in_fan_out inference_mode "
    "layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_config megatron_core peft_version "
    "qalora_group_size revision runtime_config target_modules task_type"
).split()
UNSUPPORTED = (
    "alora_invocation_tokens arrow_config ensure_weight_tying kasa_config layer_replication lora_bias monteclora_config target_parameters "
    "trainable_token_indices use_bdlora use_dora use_qalora velora_config"
).split()


def merge_lora(files: list[WeightFile], adapter: Path, model: CausalLM) -> list[WeightFile]:
    """Return the files with the adapter merged: sums in float32, results in the base dtype, one tensor at a time.

    `model`: the model of the files; it may be on the meta device. Raises UserError for an adapter that is damaged, not
    supported or for another model.
    """
    settings, weights = open_adapter(adapter)
    changes = read_changes(weights, settings)
    for name, change in changes.items():
        _check(name, change, weights, settings, model)
    model_names = full_names(parameter_shapes(model))
    merged: list[WeightFile] = []
    missing = set(changes)
    for file in files:
        file_changes = {name: changes[model_names[name]] for name in file.shapes if model_names.get(name) in changes}
        missing -= {model_names[name] for name in file_changes}
        merged.append(MergedFile(file, file_changes, weights))
    if missing:
        raise UserError(f"{weights.path} changes {min(missing)}, which {files[0].path.parent} does not hold")
    return merged


def open_adapter(adapter: Path) -> tuple["Settings", SafetensorsFile]:
    """Return the settings and tensors of an adapter folder. Raises UserError if either is missing or not supported."""
    settings = read_settings(adapter)
    path = adapter / WEIGHTS
    if not path.is_file():
        raise UserError(f"{adapter} has no {WEIGHTS}: save the adapter as safetensors")
    return settings, SafetensorsFile(path)


@dataclass(frozen=True)
class Settings:
    r: int
    alpha: float
    use_rslora: bool
    ranks: dict[str, int]
    """By pattern; the first pattern that matches a module's name applies."""
    alphas: dict[str, float]
    trains_biases: bool
    modules_to_save: tuple[str, ...]

    def rank(self, module: str) -> int:
        return _first_match(self.ranks, module, self.r)

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        return _first_match(self.alphas, module, self.alpha) / (rank**0.5 if self.use_rslora else rank)


def read_settings(adapter: Path) -> Settings:
    """Read adapter_config.json.

    Raises UserError if it is missing or damaged, or needs a feature that is not implemented.
    """
    if not (adapter / CONFIG).is_file():
        raise UserError(f"{adapter} has no {CONFIG}: give the folder of a PEFT adapter")
    config = ConfigReader.from_folder(adapter, CONFIG)
    config.expect("peft_type", ("LORA",), None)
    config.expect("init_lora_weights", KEEP_BASE, True)
    for key in UNSUPPORTED:
        config.expect(key, (None, False, [], {}), None)
    for key in TRAINING_KEYS:
        config.raw(key)
    saved = config.raw("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise UserError(f"{adapter / CONFIG}: modules_to_save={saved!r} is not a list of names")
    ranks, alphas = (_patterns(config, key, str(adapter / CONFIG)) for key in ("rank_pattern", "alpha_pattern"))
    settings = Settings(
        r=config.count("r", 8),
        alpha=config.positive("lora_alpha", 8.0),
        use_rslora=config.get("use_rslora", bool, False),
        ranks={text_name(key): ranks.count(key) for key in config.get("rank_pattern", dict, {})},
        alphas={text_name(key): alphas.positive(key) for key in config.get("alpha_pattern", dict, {})},
        trains_biases=config.expect("bias", ("none", "all", "lora_only"), "none") != "none",
        modules_to_save=tuple(saved),
    )
    if unread := config.unread():
        log.warning("%s has keys that are not used: %s", adapter / CONFIG, ", ".join(unread))
    return settings


def _patterns(config: ConfigReader, key: str, where: str) -> ConfigReader:
    patterns: dict[str, Any] = config.get(key, dict, {})
    for pattern in patterns:
        if not PLAIN_PATTERN.fullmatch(pattern):
            raise UserError(
                f"{where}: {key} has {pattern!r}: only names and dots are supported, not other regular expressions"
            )
    return ConfigReader(patterns, f"{where}: {key}")


def _first_match(patterns: dict[str, Number], module: str, default: Number) -> Number:
    """Return the value of the pattern that `get_pattern_key` in peft/utils/other.py selects."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


@dataclass
class Change:
    """The change of one parameter: a replacement tensor, an added product, or both."""

    replacement: str | None = None
    a: str | None = None
    """Name of the adapter's tensor A [r, I]; [r, V] for an embedding."""
    b: str | None = None
    """Name of B [O, r]; [E, r] for an embedding."""
    scale: float = 0.0
    is_transposed: bool = False
    """Whether the parameter is [I, O], as embeddings [V, E] and GPT-2's Conv1D weights are."""


def read_changes(weights: SafetensorsFile, settings: Settings) -> dict[str, Change]:
    """Return the changes by parameter name. Every tensor of the adapter belongs to one change.

    For an adapter of a multimodal model, the names are parameters of its text model. Raises UserError for unknown
    tensors, and if there are none.
    """
    changes: dict[str, Change] = {}
    for key in weights.shapes:
        name = key.removeprefix(PREFIX)
        if name != key and (match := FACTORS.fullmatch(name)):
            target, role = f"{text_name(match[1])}.weight", match[3].lower()
        elif name != key and (match := PARAMETER.fullmatch(name)) and _is_saved(match, settings):
            target, role = f"{text_name(match[1])}.{match[3]}", "replacement"
        else:
            raise UserError(
                f"{weights.path}: {key} is neither a factor of LoRA nor of a module that {CONFIG} lists as saved"
            )
        change = changes.setdefault(target, Change())
        if previous := getattr(change, role):
            raise UserError(f"{weights.path}: {key} and {previous} are both for {target}")
        setattr(change, role, key)
    if not changes:
        raise UserError(f"{weights.path} holds no tensors, so it changes nothing: download the adapter again")
    return changes


def _is_saved(match: re.Match[str], settings: Settings) -> bool:
    """Whether PEFT saves this module whole.

    PEFT also saves embedding and head (`save_embedding_layers`), and matches names by suffix (`_set_trainable`).
    """
    module, base_layer, leaf = match.groups()
    if leaf == "bias" and settings.trains_biases:
        return True
    return bool(base_layer) or module.endswith((*settings.modules_to_save, *EMBEDDINGS))


def _check(name: str, change: Change, weights: SafetensorsFile, settings: Settings, model: CausalLM) -> None:
    """Compare shapes with the model, and set the change's scale and orientation."""
    module = name.rpartition(".")[0]
    parameter = dict(model.named_parameters()).get(name)
    if tied_embedding(model.head) is not None and module in (HEAD, model.layout.head, model.layout.embedding):
        raise UserError(
            f"{weights.path} changes {module}, but this model's head and embedding are tied and cannot differ"
        )
    if parameter is None:
        raise UserError(
            f"{weights.path} changes {name}, which this model does not have: the adapter belongs to another model"
        )
    if change.replacement is not None:
        expect_shape(weights, change.replacement, tuple(parameter.shape))
    if change.a is None and change.b is None:
        return
    layer = model.get_submodule(module)
    if not isinstance(layer, Linear | Embedding):
        raise UserError(f"{weights.path} adapts {module}, but LoRA on {type(layer).__name__} is not supported")
    change.is_transposed = isinstance(layer, Embedding) or layer.is_transposed
    change.scale = settings.scale(module)
    outputs, inputs = reversed(parameter.shape) if change.is_transposed else parameter.shape
    expect_factors(weights, change, settings.rank(module), inputs, outputs)


def expect_factors(weights: SafetensorsFile, change: Change, rank: int, inputs: int, outputs: int) -> tuple[str, str]:
    """Return the names of A and B.

    Raises UserError if one is missing, is not a float tensor, or is not [rank, inputs] or [outputs, rank].
    """
    if change.a is None or change.b is None:
        raise UserError(f"{weights.path}: {change.a or change.b} is alone: LoRA needs both factors, A and B")
    for key, shape in ((change.a, (rank, inputs)), (change.b, (outputs, rank))):
        expect_shape(weights, key, shape)
        if not (dtype := weights.dtypes[key]).is_floating_point:
            raise UserError(f"{weights.path}: {key} is {dtype}: LoRA's factors are floats")
    return change.a, change.b


def expect_shape(weights: SafetensorsFile, key: str, expected: tuple[int, ...]) -> None:
    if weights.shapes[key] != expected:
        raise UserError(
            f"{weights.path}: {key} is {list(weights.shapes[key])}, but the model and {CONFIG} need {list(expected)}"
        )


class MergedFile:
    """A base file that returns the changed tensors with the adapter merged."""

    def __init__(self, base: WeightFile, changes: dict[str, Change], adapter: SafetensorsFile) -> None:
        self.path, self.shapes, self.dtypes, self.is_mapped = base.path, base.shapes, base.dtypes, base.is_mapped
        self._base = base
        self._changes = changes
        self._adapter = adapter

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._base.read(names):
            yield name, self._changed(name, tensor) if name in self._changes else tensor

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise UserError(f"{self.path}: {name} is {tensor.dtype}: an adapter can be merged only into floats")
        change, dtype = self._changes[name], tensor.dtype
        if change.replacement is not None:
            tensor = self._read(change.replacement)
        if change.a is not None and change.b is not None:
            a, b = self._read(change.a).float(), self._read(change.b).float()
            left, right = (a.T, b.T) if change.is_transposed else (b, a)
            tensor = torch.addmm(tensor.float(), left, right, alpha=change.scale)
        return tensor.to(dtype)

    def _read(self, key: str) -> Tensor:
        return next(iter(self._adapter.read([key])))[1]
