"""Architectures by the `model_type` of config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from models import baichuan, chatglm, chatglm2, glm, glm4, llama
from models.causal_lm import CausalLM
from models.config import ConfigReader


@dataclass(frozen=True)
class Architecture:
    read_config: Callable[[ConfigReader], Any]
    build: Callable[[Any], CausalLM]
    ignored_tensors: tuple[str, ...] = ()
    """Suffixes of tensors that some checkpoints carry and this architecture computes itself."""


ARCHITECTURES = {
    "baichuan": Architecture(baichuan.read_config, baichuan.Baichuan, ignored_tensors=("rotary_emb.inv_freq",)),
    "chatglm": Architecture(chatglm.read_config, chatglm.ChatGLM, ignored_tensors=("rotary_emb.inv_freq",)),
    "glm": Architecture(glm.read_config, glm.Glm, ignored_tensors=("rotary_emb.inv_freq",)),
    "glm4": Architecture(glm.read_config, glm4.Glm4, ignored_tensors=("rotary_emb.inv_freq",)),
    "llama": Architecture(llama.read_config, llama.Llama, ignored_tensors=("rotary_emb.inv_freq",)),
}

# ChatGLM2, ChatGLM3 and GLM-4 call themselves chatglm, too; only ChatGLM-6B has no padded_vocab_size.
CHATGLM2 = Architecture(chatglm2.read_config, chatglm2.ChatGLM2, ignored_tensors=("rotary_pos_emb.inv_freq",))


def find_architecture(config: ConfigReader) -> Architecture:
    """Raises UserError, with the names that exist, for a model_type that is not one of them."""
    model_type = config.require("model_type", str)
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"config.json: model_type={model_type!r} is not supported: only {', '.join(sorted(ARCHITECTURES))}"
        )
    config.expect("quantization_config", (None,), None)
    if model_type == "chatglm" and config.raw("padded_vocab_size") is not None:
        return CHATGLM2
    return ARCHITECTURES[model_type]
