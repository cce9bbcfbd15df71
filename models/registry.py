"""The supported architectures, by the `model_type` of config.json."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.heads import HeadKind, put_label_head, read_num_labels, refuse_bidirectional, remove_head

FAMILIES = "models.families"


@dataclass(frozen=True)
class Architecture:
    """One architecture. Its modules are imported on first use, because a run uses only one architecture."""

    families: str
    """The names of the model families, for documentation."""
    reader: str
    """`MODULE.FUNCTION` in models/families that reads the ModelShape of a config."""
    model: str
    """`MODULE.CLASS` in models/families of the CausalLM."""
    ignored_tensors: tuple[str, ...] = ()
    """Suffixes of tensors that some checkpoints hold, but this architecture computes."""
    head: HeadKind = HeadKind.vocabulary
    num_labels: int | None = None
    """The number of labels of the classification head. None: the checkpoint has a vocabulary head."""

    @property
    def read_config(self) -> Callable[[ConfigReader], Any]:
        """The function that reads the architecture's ModelShape."""
        read: Callable[[ConfigReader], Any] = _named(self.reader)
        return read

    @property
    def model_class(self) -> type[CausalLM]:
        """The model class. It takes the result of `read_config`."""
        model_class: type[CausalLM] = _named(self.model)
        return model_class

    def build(self, shape: Any) -> CausalLM:
        """Build the model from the result of `read_config`, with its `head`."""
        model = self.model_class(shape)
        if self.num_labels is not None:
            put_label_head(model, self.num_labels)
        if self.head is HeadKind.none:
            remove_head(model)
        return model


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"{FAMILIES}.{module}"), attribute)


INV_FREQ = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")
MASKS = (".attn.bias", ".attn.masked_bias", ".attn.causal_mask")

ARCHITECTURES = {
    "afmoe": Architecture("Arcee Trinity", "afmoe.read_config", "afmoe.Afmoe"),
    "apertus": Architecture("Apertus", "apertus.read_config", "apertus.Apertus"),
    "arcee": Architecture("Arcee AFM", "arcee.read_config", "arcee.Arcee"),
    "baichuan": Architecture(
        "Baichuan 7B and 13B, Baichuan2 7B and 13B",
        "baichuan.read_config",
        "baichuan.Baichuan",
        INV_FREQ,
    ),
    "bamba": Architecture("Bamba", "bamba.read_config", "bamba.Bamba"),
    "bitnet": Architecture("BitNet b1.58", "bitnet.read_config", "bitnet.BitNet"),
    "bloom": Architecture("BLOOM", "bloom.read_config", "bloom.Bloom"),
    "chatglm": Architecture("ChatGLM-6B", "chatglm.read_config", "chatglm.ChatGLM", INV_FREQ),
    "codegen": Architecture("CodeGen", "codegen.read_config", "codegen.CodeGen", MASKS),
    "cohere": Architecture("Command R, Command R+, Aya", "cohere.read_config", "cohere.Cohere", INV_FREQ),
    "cohere2": Architecture("Command R7B, Command A", "cohere2.read_config", "cohere2.Cohere2"),
    "cwm": Architecture("Code World Model", "cwm.read_config", "cwm.Cwm"),
    "deepseek_v2": Architecture("DeepSeek-V2", "deepseek_config.read_config_v2", "deepseek.Deepseek", INV_FREQ),
    "deepseek_v3": Architecture("DeepSeek-V3, R1", "deepseek_config.read_config_v3", "deepseek.Deepseek", INV_FREQ),
    "dots1": Architecture("dots.llm1", "dots1.read_config", "dots1.Dots1"),
    "ernie3_5": Architecture("Ernie 3.5 SE, in PaddleNLP's layout", "ernie3_5.read_config", "ernie3_5.Ernie35"),
    "ernie4_5": Architecture("Ernie 4.5", "ernie4_5.read_config", "ernie4_5.Ernie45"),
    "ernie4_5_moe": Architecture("Ernie 4.5 MoE", "ernie4_5_moe.read_config", "ernie4_5_moe.Ernie45Moe"),
    "exaone4": Architecture("EXAONE 4", "exaone4.read_config", "exaone4.Exaone4"),
    "exaone_moe": Architecture("K-EXAONE", "exaone_moe.read_config", "exaone_moe.ExaoneMoe"),
    "falcon": Architecture("Falcon", "falcon.read_config", "falcon.Falcon", INV_FREQ),
    "falcon_h1": Architecture("Falcon-H1", "falcon_h1_config.read_config", "falcon_h1.FalconH1"),
    "gemma": Architecture("Gemma 1, CodeGemma", "gemma.read_config", "gemma.Gemma", INV_FREQ),
    "gemma2": Architecture("Gemma 2", "gemma2.read_config", "gemma2.Gemma2", INV_FREQ),
    "gemma3_text": Architecture("Gemma 3", "gemma3.read_config", "gemma3.Gemma3", INV_FREQ),
    "gemma3n_text": Architecture("Gemma 3n", "gemma3n_config.read_config", "gemma3n.Gemma3n"),
    "gemma4_text": Architecture("Gemma 4", "gemma4_config.read_config", "gemma4.Gemma4"),
    "gemma4_unified_text": Architecture("Gemma 4 Unified", "gemma4_config.read_unified_config", "gemma4.Gemma4"),
    "glm": Architecture("GLM-4-9B", "glm.read_config", "glm.Glm", INV_FREQ),
    "glm4": Architecture("GLM-4-0414", "glm.read_config", "glm4.Glm4", INV_FREQ),
    "glm4_moe": Architecture("GLM-4.5, 4.5-Air, 4.6", "glm4_moe.read_config", "glm4_moe.Glm4Moe"),
    "glm4_moe_lite": Architecture("GLM-4.7-Flash", "glm4_moe_lite.read_config", "deepseek.Deepseek"),
    "gpt2": Architecture("GPT-2", "gpt2.read_config", "gpt2.GPT2", MASKS),
    "gpt_bigcode": Architecture("StarCoder, SantaCoder", "gpt_bigcode.read_config", "gpt_bigcode.GPTBigCode", MASKS),
    "gpt_neo": Architecture(
        "GPT-Neo", "gpt_neo.read_config", "gpt_neo.GPTNeo", ("attention.bias", "attention.masked_bias")
    ),
    "gpt_neox": Architecture(
        "GPT-NeoX, Pythia",
        "gpt_neox.read_config",
        "gpt_neox.GPTNeoX",
        ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    ),
    "gpt_oss": Architecture("gpt-oss", "gpt_oss.read_config", "gpt_oss.GptOss"),
    "gptj": Architecture("GPT-J", "gptj.read_config", "gptj.GPTJ", MASKS),
    "granite": Architecture("Granite 3", "granite.read_config", "granite.Granite"),
    "granitemoe": Architecture("Granite 3 MoE", "granite_moe.read_config", "granite_moe.GraniteMoe"),
    "granitemoehybrid": Architecture("Granite 4", "granite_hybrid.read_config", "granite_hybrid.GraniteHybrid"),
    "granitemoeshared": Architecture(
        "Granite 4 preview, MoE with a shared part", "granite_moe.read_config", "granite_moe.GraniteMoeShared"
    ),
    "helium": Architecture("Helium", "helium.read_config", "helium.Helium"),
    "hunyuan_v1_dense": Architecture(
        "Hunyuan 0.5B to 7B", "hunyuan_v1_dense.read_config", "hunyuan_v1_dense.HunyuanDense"
    ),
    "hunyuan_v1_moe": Architecture("Hunyuan A13B", "hunyuan_v1_moe.read_config", "hunyuan_v1_moe.HunyuanMoe"),
    "hyperclovax": Architecture("HyperCLOVA X", "hyperclovax.read_config", "hyperclovax.HyperCLOVAX"),
    "internlm2": Architecture("InternLM2, 2.5", "internlm2.read_config", "internlm2.InternLM2", INV_FREQ),
    "internlm3": Architecture("InternLM3", "internlm3.read_config", "seed_oss.SeedOss", INV_FREQ),
    "jais2": Architecture("Jais 2", "jais2.read_config", "jais2.Jais2"),
    "kimi_k2": Architecture("Kimi K2", "deepseek_config.read_config_v3", "deepseek.Deepseek", INV_FREQ),
    "kimi_linear": Architecture("Kimi Linear", "kimi_linear.read_config", "kimi_linear.KimiLinear"),
    "lfm2": Architecture("LFM2, LFM2.5", "lfm2.read_config", "lfm2.Lfm2"),
    "lfm2_moe": Architecture("LFM2-8B-A1B", "lfm2_moe.read_config", "lfm2_moe.Lfm2Moe"),
    "llama": Architecture(
        "Llama 1, 2, 3, 3.1, 3.2, Llama Guard, TinyLlama and models of this architecture",
        "llama.read_config",
        "llama.Llama",
        INV_FREQ,
    ),
    "llama4_text": Architecture("Llama 4", "llama4.read_config", "llama4.Llama4"),
    "mamba2": Architecture("Mamba-2, Codestral Mamba", "mamba2.read_config", "mamba2.Mamba2LM"),
    "minicpm3": Architecture("MiniCPM3", "minicpm3.read_config", "minicpm3.MiniCPM3"),
    "minimax_m2": Architecture("MiniMax-M2", "minimax_m2.read_config", "minimax_m2.MiniMaxM2"),
    "ministral": Architecture("Ministral 8B", "ministral.read_config", "cwm.Cwm"),
    "ministral3": Architecture("Ministral 3", "ministral3.read_config", "ministral3.Ministral3"),
    "mistral": Architecture("Mistral", "mistral.read_config", "mistral.Mistral"),
    "mistral4": Architecture("Mistral Small 4", "mistral4.read_config", "mistral4.Mistral4"),
    "mixtral": Architecture("Mixtral 8x7B, 8x22B", "mixtral.read_config", "mixtral.Mixtral"),
    "mpt": Architecture("MPT", "mpt.read_config", "mpt.Mpt"),
    "nanochat": Architecture("nanochat", "nanochat.read_config", "nanochat.Nanochat"),
    "nemotron": Architecture("Nemotron-4, Minitron", "nemotron.read_config", "nemotron.Nemotron"),
    "nemotron_h": Architecture("Nemotron-H, Nemotron Nano 2, 3", "nemotron_h.read_config", "nemotron_h.NemotronH"),
    "olmo": Architecture("OLMo", "olmo.read_config", "olmo.Olmo"),
    "olmo2": Architecture("OLMo 2", "olmo2.read_config", "olmo2.Olmo2"),
    "olmo3": Architecture("OLMo 3", "olmo3.read_config", "olmo3.Olmo3"),
    "olmoe": Architecture("OLMoE", "olmoe.read_config", "olmoe.Olmoe"),
    "opt": Architecture("OPT, Galactica", "opt.read_config", "opt.OPT"),
    "phi": Architecture("Phi-1, Phi-1.5, Phi-2", "phi.read_config", "phi.Phi", INV_FREQ),
    "phi3": Architecture("Phi-3, Phi-4", "phi3.read_config", "phi3.Phi3", INV_FREQ),
    "phimoe": Architecture("Phi-3.5-MoE", "phimoe.read_config", "phimoe.Phimoe"),
    "qwen": Architecture("Qwen (2023)", "qwen.read_config", "qwen.Qwen", ("rotary_emb.inv_freq", "attn.masked_bias")),
    "qwen2": Architecture("Qwen 1.5, 2, 2.5", "qwen2.read_config", "qwen2.Qwen2"),
    "qwen2_moe": Architecture("Qwen1.5-MoE, Qwen2-MoE", "qwen2_moe.read_config", "qwen2_moe.Qwen2Moe"),
    "qwen3": Architecture("Qwen 3", "qwen3.read_config", "qwen3.Qwen3"),
    "qwen3_moe": Architecture("Qwen3-MoE", "qwen3_moe.read_config", "qwen3_moe.Qwen3Moe"),
    "qwen3_5_moe_text": Architecture("Qwen3.5-MoE, Qwen3.6-MoE", "qwen3_5.read_moe_config", "qwen3_5.Qwen35Moe"),
    "qwen3_5_text": Architecture("Qwen3.5, Qwen3.6", "qwen3_5.read_config", "qwen3_5.Qwen35"),
    "qwen3_next": Architecture("Qwen3-Next", "qwen3_next_config.read_mixtures", "qwen3_next.Qwen3Next"),
    "seed_oss": Architecture("Seed-OSS", "seed_oss.read_config", "seed_oss.SeedOss"),
    "solar_open": Architecture("Solar Open", "solar_open.read_config", "glm4_moe.Glm4Moe"),
    "stablelm": Architecture("StableLM, StableLM 2", "stablelm.read_config", "stablelm.StableLm", INV_FREQ),
    "starcoder2": Architecture("StarCoder 2", "starcoder2.read_config", "starcoder2.Starcoder2"),
    "smollm3": Architecture("SmolLM3", "smollm3.read_config", "smollm3.SmolLM3"),
    "telechat": Architecture("TeleChat, TeleChat2", "telechat.read_config", "telechat.TeleChat", INV_FREQ),
}

# ChatGLM2, ChatGLM3 and GLM-4 share the model_type chatglm with ChatGLM-6B. Only ChatGLM-6B has no padded_vocab_size.
CHATGLM2 = Architecture(
    "ChatGLM2-6B, ChatGLM3-6B, GLM-4 in its own layout",
    "chatglm2.read_config",
    "chatglm2.ChatGLM2",
    INV_FREQ,
)

ENCODERS = frozenset(
    """
    albert bert camembert deberta deberta-v2 distilbert electra eurobert gte layoutlmv3 mpnet modernbert new nomic_bert roberta t5
    xlm-roberta xlm-roberta-xl
    """.split()
)


def find_architecture(config: ConfigReader) -> Architecture:
    """Return the architecture for config.json's `model_type`, with the head that `architectures` selects.

    Raises UserError with the supported names for an unknown `model_type`, and for bidirectional attention.
    """
    refuse_bidirectional(config)
    model_type = config.require("model_type", str)
    if model_type in ENCODERS:
        remedy = "give a model with causal attention"
        raise UserError(
            f"config.json: model_type={model_type!r} is a bidirectional encoder, which is not supported: {remedy}"
        )
    if model_type == "minimax" and config.raw("architectures") == ["MiniMaxM2ForCausalLM"]:
        model_type = "minimax_m2"  # the first files of MiniMax-M2 use the model_type of another model
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"config.json: model_type={model_type!r} is not supported: only {', '.join(sorted(ARCHITECTURES))}"
        )
    is_chatglm2 = model_type == "chatglm" and config.raw("padded_vocab_size") is not None
    architecture = CHATGLM2 if is_chatglm2 else ARCHITECTURES[model_type]
    num_labels = read_num_labels(config)
    return architecture if num_labels is None else replace(architecture, head=HeadKind.labels, num_labels=num_labels)
