"""Architectures by the `model_type` of config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from models import deepseek, llama
from models.causal_lm import CausalLM
from models.config import ConfigReader


@dataclass(frozen=True)
class Architecture:
    read_config: Callable[[ConfigReader], Any]
    build: Callable[[Any], CausalLM]
    ignored_tensors: tuple[str, ...] = ()
    """Suffixes of tensors that some checkpoints carry and this architecture computes itself."""


ARCHITECTURES = {
    "deepseek_v2": Architecture(deepseek.read_config_v2, deepseek.Deepseek, ignored_tensors=("rotary_emb.inv_freq",)),
    "deepseek_v3": Architecture(deepseek.read_config_v3, deepseek.Deepseek, ignored_tensors=("rotary_emb.inv_freq",)),
    "llama": Architecture(llama.read_config, llama.Llama, ignored_tensors=("rotary_emb.inv_freq",)),
}


def find_architecture(config: ConfigReader) -> Architecture:
    """Raises UserError, with the names that exist, for a model_type that is not one of them."""
    model_type = config.require("model_type", str)
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"config.json: model_type={model_type!r} is not supported: only {', '.join(sorted(ARCHITECTURES))}"
        )
    config.expect("quantization_config", (None,), None)
    return ARCHITECTURES[model_type]
