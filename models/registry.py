"""Architectures by the `model_type` of config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from models import llama, mistral, mixtral, qwen, qwen2, qwen2_moe, qwen3, qwen3_moe
from models.causal_lm import CausalLM
from models.config import ConfigReader


@dataclass(frozen=True)
class Architecture:
    read_config: Callable[[ConfigReader], Any]
    build: Callable[[Any], CausalLM]
    ignored_tensors: tuple[str, ...] = ()
    """Suffixes of tensors that some checkpoints carry and this architecture computes itself."""


ARCHITECTURES = {
    "llama": Architecture(llama.read_config, llama.Llama, ignored_tensors=("rotary_emb.inv_freq",)),
    "mistral": Architecture(mistral.read_config, mistral.Mistral),
    "mixtral": Architecture(mixtral.read_config, mixtral.Mixtral),
    "qwen": Architecture(qwen.read_config, qwen.Qwen, ignored_tensors=("rotary_emb.inv_freq", "attn.masked_bias")),
    "qwen2": Architecture(qwen2.read_config, qwen2.Qwen2),
    "qwen2_moe": Architecture(qwen2_moe.read_config, qwen2_moe.Qwen2Moe),
    "qwen3": Architecture(qwen3.read_config, qwen3.Qwen3),
    "qwen3_moe": Architecture(qwen3_moe.read_config, qwen3_moe.Qwen3Moe),
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
