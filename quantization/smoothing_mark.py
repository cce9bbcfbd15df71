"""Whether layers of a quantised model read inputs that were scaled: config.json says so of ours, as no weight does."""

from pathlib import Path
from typing import Any

from conf.quantization import QuantMethod
from models.config import ConfigReader

SMOOTHED_BY = "smoothed_by"
SMOOTHING = (QuantMethod.awq, QuantMethod.smoothquant)
RECIPE = "recipe.yaml"  # of llm-compressor, beside the model
MODIFIERS = ("AWQModifier", "SmoothQuantModifier")


def mark_smoothing(method: QuantMethod) -> dict[str, Any]:
    """Return what config.json holds besides where the method folds scales into weights."""
    return {SMOOTHED_BY: method.name} if method in SMOOTHING else {}


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
