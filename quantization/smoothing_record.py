"""What the folder of a model tells of scales that were folded into its weights: that there are any, and in ours their numbers.

config.json names the method, `smoothing.safetensors` holds the vectors: float32 `LAYER.input_scales` [I], by which the layer's inputs are
divided, and `LAYER.output_scales` [O], by which its outputs are. No index lists that file, so that other tools do not read it.
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
SMOOTHING = (QuantMethod.awq, QuantMethod.smoothquant)
FOLDS = "smoothing.safetensors"
INPUTS, OUTPUTS = "input_scales", "output_scales"
RECIPE = "recipe.yaml"  # of llm-compressor, beside the model
MODIFIERS = ("AWQModifier", "SmoothQuantModifier")


def mark_smoothing(quant: QuantConfig) -> dict[str, Any]:
    """Return what config.json holds besides where the method folds scales into weights."""
    name = f"{quant.method.name} with quant.shift" if quant.shift else quant.method.name
    return {SMOOTHED_BY: name} if quant.method in SMOOTHING else {}


def smoothed_by(config: ConfigReader, folder: Path) -> str | None:
    """Return the name of the method whose scales are folded into the weights of a checkpoint; None where no sign of one is found.

    Files of AutoAWQ and the recipes of llm-compressor tell, too.
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
    """Return the tensors of the file that hold the folds, by the layer's full name."""
    tensors: dict[str, Tensor] = {}
    for layer, fold in folds.items():
        own = {INPUTS: fold.input_scales, OUTPUTS: fold.output_scales}
        tensors |= {f"{layer}.{name}": scales for name, scales in own.items() if scales is not None}
    return tensors


def add_folds(folder: Path, folds: Mapping[str, Tensor]) -> None:
    """Write what `fold_tensors` gives of further layers into a folder's file of them. Raises UserError where that is damaged."""
    path = folder / FOLDS
    tensors = SafetensorsFile(path).read_whole()[0] if path.is_file() else {}
    save_tensors(path, tensors | dict(folds), {})


def copy_folds(folder: Path, to: Path, model: CausalLM) -> None:
    """Copy what a checkpoint's folder tells, of the layers that rows can adapt, into that of its exported model. Raises as `read_folds`."""
    if (folds := read_folds(folder, model)) is not None:
        layers = adaptable_layers(model)
        add_folds(to, fold_tensors({name: fold for name, fold in folds.items() if name in layers}))
    if (folder / RECIPE).is_file():
        shutil.copyfile(folder / RECIPE, to / RECIPE)


def read_folds(folder: Path, model: CausalLM) -> dict[str, Fold] | None:
    """Return the folds that a checkpoint's folder holds, by the linear layer's name in `model`; None where it tells of none.

    Raises UserError for a damaged file, and for one of another model.
    """
    path = folder / FOLDS
    if not path.is_file():
        return None
    modules = dict(model.named_modules())
    shapes = {name: module.whole_shape for name, module in modules.items() if isinstance(module, LoRATarget)}
    found: dict[str, dict[str, Tensor]] = {}
    for key, scales in SafetensorsFile(path).read_whole()[0].items():
        layer, _, own = key.rpartition(".")
        if is_missing(layer, modules):
            continue
        outputs, inputs = shapes.get(layer, (0, 0))
        if scales.shape != ({INPUTS: inputs, OUTPUTS: outputs}.get(own),) or layer not in shapes:
            raise UserError(
                f"{path}: {key} {list(scales.shape)} fits no layer of this model: it belongs to another one"
            )
        if scales.dtype != torch.float32 or not (scales.isfinite() & (scales > 0)).all():
            raise UserError(f"{path}: {key} does not hold positive float32 numbers: quantise the float model anew")
        found.setdefault(layer, {})[own] = scales
    return {layer: Fold(own.get(INPUTS), own.get(OUTPUTS)) for layer, own in found.items()}
