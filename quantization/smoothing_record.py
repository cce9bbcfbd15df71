"""The record of scales that were folded into a checkpoint's weights.

config.json names the method. `smoothing.safetensors` holds float32 vectors: `LAYER.input_scales` [I] divide the layer's
inputs, `LAYER.output_scales` [O] divide its outputs. No index lists this file, so that other tools do not read it.
I input channels, O output channels of a linear layer.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import QuantConfig, QuantMethod
from models.adapters import Fold, adaptable_layers
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.formats.huggingface import SafetensorsFile
from models.formats.safetensors_writer import save_tensors
from models.layers.lora_target import LoRATarget
from models.layers.missing import is_missing

SMOOTHED_BY = "smoothed_by"
FOLDS = "smoothing.safetensors"
INPUTS, OUTPUTS = "input_scales", "output_scales"
RECIPE = "recipe.yaml"  # written by llm-compressor into the model's folder
MODIFIERS = ("AWQModifier", "SmoothQuantModifier")


def mark_smoothing(quant: QuantConfig) -> dict[str, Any]:
    """Return the additional entry of config.json for a method that folds scales into weights; else empty."""
    name = f"{quant.method.name} with quant.shift" if quant.shift else quant.method.name
    return {SMOOTHED_BY: name} if quant.method.folds_scales else {}


def smoothed_by(config: ConfigReader, folder: Path) -> str | None:
    """Return the method whose scales are folded into a checkpoint's weights; None if the checkpoint does not show one.

    AutoAWQ's config and llm-compressor's recipe show it, too.
    """
    if (method := config.raw(SMOOTHED_BY)) is not None:
        return str(method)
    section = config.section("quantization_config")
    if section is None:
        return None
    if section.raw("quant_method") == QuantMethod.awq.name:
        return QuantMethod.awq.name
    recipe = folder / RECIPE
    text = recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else ""
    return next((name.removesuffix("Modifier").lower() for name in MODIFIERS if name in text), None)


def fold_tensors(folds: Mapping[str, Fold]) -> dict[str, Tensor]:
    """Return the tensors that record the folds. `folds` are by full layer name."""
    tensors: dict[str, Tensor] = {}
    for layer, fold in folds.items():
        scales_of_layer = {INPUTS: fold.input_scales, OUTPUTS: fold.output_scales}
        tensors |= {f"{layer}.{name}": scales for name, scales in scales_of_layer.items() if scales is not None}
    return tensors


def add_folds(folder: Path, folds: Mapping[str, Tensor]) -> None:
    """Add the result of `fold_tensors` to the folder's file of folds. Raises UserError if that file is damaged."""
    path = folder / FOLDS
    tensors = SafetensorsFile(path).read_whole()[0] if path.is_file() else {}
    save_tensors(path, tensors | dict(folds), {})


def copy_folds(folder: Path, to: Path, model: CausalLM) -> None:
    """Copy the record of a checkpoint's folder into the folder of its exported model, for layers that take adapters.

    Raises UserError as `read_folds` does.
    """
    if (folds := read_folds(folder, model)) is not None:
        layers = adaptable_layers(model)
        add_folds(to, fold_tensors({name: fold for name, fold in folds.items() if name in layers}))
    if (folder / RECIPE).is_file():
        shutil.copyfile(folder / RECIPE, to / RECIPE)


def read_folds(folder: Path, model: CausalLM) -> dict[str, Fold] | None:
    """Return the folds in a checkpoint's folder, by linear layer name; None if it has no such file.

    Raises UserError for a damaged file, and for a file of another model.
    """
    path = folder / FOLDS
    if not path.is_file():
        return None
    modules = dict(model.named_modules())
    shapes = {name: module.whole_shape for name, module in modules.items() if isinstance(module, LoRATarget)}
    scales_by_layer: dict[str, dict[str, Tensor]] = {}
    for key, scales in SafetensorsFile(path).read_whole()[0].items():
        layer, _, name = key.rpartition(".")
        if is_missing(layer, modules):
            continue
        outputs, inputs = shapes.get(layer, (0, 0))
        if scales.shape != ({INPUTS: inputs, OUTPUTS: outputs}.get(name),) or layer not in shapes:
            raise UserError(
                f"{path}: {key} {list(scales.shape)} matches no layer of this model: the file belongs to another model"
            )
        if scales.dtype != torch.float32 or not (scales.isfinite() & (scales > 0)).all():
            raise UserError(f"{path}: {key} does not hold positive float32 numbers: quantise the float model again")
        scales_by_layer.setdefault(layer, {})[name] = scales
    return {layer: Fold(folded.get(INPUTS), folded.get(OUTPUTS)) for layer, folded in scales_by_layer.items()}
