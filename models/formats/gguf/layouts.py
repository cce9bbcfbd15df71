"""llama.cpp's tensor names and layouts of every family whose GGUF files are read or written."""

from typing import Any

from models.config import ConfigReader
from models.formats.gguf import (
    fused_attention,
    grouped_mixtures,
    latent_attention,
    layer_norm_decoders,
    llama_relatives,
    names,
)
from models.formats.gguf.names import TensorLayout

LAYOUTS: dict[str, TensorLayout] = {
    **llama_relatives.LAYOUTS,
    **layer_norm_decoders.LAYOUTS,
    **grouped_mixtures.LAYOUTS,
    **latent_attention.LAYOUTS,
    **fused_attention.LAYOUTS,
    "apertus": names.APERTUS,
    "llama": names.LLAMA,
    "mistral": names.LLAMA,
    "mixtral": names.LLAMA,
    "qwen": names.QWEN,
    "qwen2": names.LLAMA,
    "qwen3": names.QWEN3,
    "qwen3_moe": names.QWEN3,
    "qwen3_next": names.QWEN3_NEXT,
    "qwen3_5_text": names.QWEN35,
    "qwen3_5_moe_text": names.QWEN35,
    "granite": names.LLAMA,
    "granitemoehybrid": names.GRANITE_HYBRID,
    "falcon_h1": names.FALCON_H1,
    "mamba2": names.MAMBA2,
    "nemotron_h": names.NEMOTRON_H,
    "gpt_oss": names.GPT_OSS,
    "gemma2": names.GEMMA,
    "gemma3_text": names.GEMMA,
    "gemma3n_text": names.GEMMA3N,
    "gemma4_text": names.GEMMA4,
    "phi3": names.PHI3,
    "glm": names.GLM,
    "glm4": names.GLM4,
    "chatglm": names.CHATGLM2,
    "gpt2": names.GPT2,
    "gpt_bigcode": names.STARCODER,
    "mpt": names.MPT,
    "bloom": names.BLOOM,
    "kimi_linear": names.KIMI_LINEAR,
    "lfm2": names.LFM2,
    "lfm2_moe": names.LFM2,
}
"""By model_type."""


def layout_to_read(config: ConfigReader) -> TensorLayout:
    """Return the layout of a file with this config, which is from read_gguf_config."""
    model_type = config.require("model_type", str)
    if model_type == "falcon" and config.raw("num_ln_in_parallel_attn") == 2:
        return fused_attention.FALCON_TWO_NORMS
    return LAYOUTS[model_type]


def layout_of(model_type: str, config: Any) -> TensorLayout:
    """Return the layout of the file that is written for a model with this config."""
    if model_type == "granitemoehybrid" and config.num_experts > 0:
        return names.GRANITE_MIXTURE
    return names.KIMI_LINEAR_OUTPUT if model_type == "kimi_linear" else LAYOUTS[model_type]
