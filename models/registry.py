"""Architectures by the `model_type` of config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from models import (
    baichuan,
    bloom,
    chatglm,
    chatglm2,
    deepseek,
    gemma2,
    glm,
    glm4,
    gpt2,
    llama,
    mistral,
    mixtral,
    opt,
    phi3,
    qwen,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
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
    "bloom": Architecture(bloom.read_config, bloom.Bloom),
    "chatglm": Architecture(chatglm.read_config, chatglm.ChatGLM, ignored_tensors=("rotary_emb.inv_freq",)),
    "deepseek_v2": Architecture(deepseek.read_config_v2, deepseek.Deepseek, ignored_tensors=("rotary_emb.inv_freq",)),
    "deepseek_v3": Architecture(deepseek.read_config_v3, deepseek.Deepseek, ignored_tensors=("rotary_emb.inv_freq",)),
    "gemma2": Architecture(gemma2.read_config, gemma2.Gemma2, ignored_tensors=("rotary_emb.inv_freq",)),
    "glm": Architecture(glm.read_config, glm.Glm, ignored_tensors=("rotary_emb.inv_freq",)),
    "glm4": Architecture(glm.read_config, glm4.Glm4, ignored_tensors=("rotary_emb.inv_freq",)),
    "gpt2": Architecture(gpt2.read_config, gpt2.GPT2, ignored_tensors=(".attn.bias", ".attn.masked_bias")),
    "llama": Architecture(llama.read_config, llama.Llama, ignored_tensors=("rotary_emb.inv_freq",)),
    "mistral": Architecture(mistral.read_config, mistral.Mistral),
    "mixtral": Architecture(mixtral.read_config, mixtral.Mixtral),
    "opt": Architecture(opt.read_config, opt.OPT),
    "phi3": Architecture(phi3.read_config, phi3.Phi3, ignored_tensors=("rotary_emb.inv_freq",)),
    "qwen": Architecture(qwen.read_config, qwen.Qwen, ignored_tensors=("rotary_emb.inv_freq", "attn.masked_bias")),
    "qwen2": Architecture(qwen2.read_config, qwen2.Qwen2),
    "qwen2_moe": Architecture(qwen2_moe.read_config, qwen2_moe.Qwen2Moe),
    "qwen3": Architecture(qwen3.read_config, qwen3.Qwen3),
    "qwen3_moe": Architecture(qwen3_moe.read_config, qwen3_moe.Qwen3Moe),
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
