"""llama.cpp's tensor names and layouts for the families whose GGUF files are read or written.

Names are from gguf's constants.py. This module and reader.py undo the changes of llama.cpp's converter.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

ROTARY_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
OUTSIDE_NAME = re.compile(r"(\w+)\.(weight|bias)")
LAYER_NAME = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")
BARE_NAME = re.compile(r"blk\.(\d+)\.([\w.]+)")
EXPERT_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(\d+)\.weight")  # in files before April 2024
EXPERTS_NAME = re.compile(r"blk\.(\d+)\.(\w+)_exps\.(weight|bias)")


@dataclass(frozen=True)
class TensorLayout:
    """Hugging Face's module names of a family by llama.cpp's, and other differences between the layouts."""

    outside_layers: Mapping[str, str]
    """Names outside of the decoder layers."""
    in_layer: Mapping[str, str]
    """Names within a layer. If the parameter's last component differs too, the entry has both last components."""
    layers: str = "model.layers"
    in_expert: Mapping[str, str] = field(default_factory=dict)
    joined_in_expert: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules of an expert whose rows one tensor of the file has, in this order."""
    experts: str = "mlp.experts"
    in_head: Mapping[str, str] = field(default_factory=dict)
    """Lists of modules, one for each head, whose vectors are the rows of one tensor of the file."""
    numbered: Mapping[str, str] = field(default_factory=dict)
    """Lists of modules outside of the decoder layers. One tensor of the file has the weights of a list."""
    transposed: tuple[str, ...] = ()
    """Modules whose weight is [O, I] in the file and [I, O] in Hugging Face's layout."""
    depthwise: tuple[str, ...] = ()
    """Modules whose weight is [C, K] or [1, C, 1, K] in the file and [C, 1, K] in Hugging Face's layout."""
    flat: tuple[str, ...] = ()
    """Suffixes of the names of vectors that are matrices in the file."""
    stacked: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    """Modules whose rows are in several tensors of the file, by llama.cpp's names of these in order."""
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules whose rows alternate in one tensor of the file, for each key head, by llama.cpp's name of it."""
    norm_offset: float = 0.0
    """Offset of the file's norm weights over Hugging Face's; Hugging Face's model adds the offset itself."""
    plain_norms: tuple[str, ...] = ()
    """Suffixes of the names of norm weights without this offset."""
    settings: tuple[str, ...] = (ROTARY_FACTORS,)
    """Tensors that are read with the config and belong to no module."""
    arrays: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Parameters of one number that the metadata holds for each layer, by key: the name within a layer and the shape."""

    def hugging_face_name(self, name: str) -> str:
        """Return the tensor's name in Hugging Face's layout. Keeps an unknown name, which is rejected later."""
        if (match := OUTSIDE_NAME.fullmatch(name)) and match[1] in self.outside_layers:
            return f"{self.outside_layers[match[1]]}.{match[2]}"
        if match := LAYER_NAME.fullmatch(name):
            module, leaf = match[2], match[3]
            if (path := f"{module}.{leaf}") in self.in_layer:
                return f"{self.layers}.{match[1]}.{self.in_layer[path]}"
            if module in self.in_layer:
                return f"{self.layers}.{match[1]}.{self.in_layer[module]}.{leaf}"
        if (match := BARE_NAME.fullmatch(name)) and match[2] in self.in_layer:
            return f"{self.layers}.{match[1]}.{self.in_layer[match[2]]}"
        if (match := EXPERT_NAME.fullmatch(name)) and match[2] in self.in_expert:
            return self._expert_name(match[1], match[3], self.in_expert[match[2]])
        return name

    def module_names(self, name: str, count: int) -> list[str] | None:
        """Return the parameters of experts, or of a list of modules, that a tensor [count, ...] holds, else None."""
        if (match := OUTSIDE_NAME.fullmatch(name)) and match[1] in self.numbered:
            return [f"{self.numbered[match[1]]}.{i}.{match[2]}" for i in range(count)]
        match = EXPERTS_NAME.fullmatch(name)
        if match is None or match[2] not in {*self.in_expert, *self.joined_in_expert}:
            return None
        modules = self.joined_in_expert.get(match[2]) or (self.in_expert[match[2]],)
        return [self._expert_name(match[1], i, module, match[3]) for i in range(count) for module in modules]

    def head_names(self, name: str, count: int) -> list[str] | None:
        """Return the names of the vectors that a tensor [count, ...] of `in_head` holds; None for other tensors."""
        match = LAYER_NAME.fullmatch(name)
        if match is None or match[2] not in self.in_head:
            return None
        return [f"{self.layers}.{match[1]}.{self.in_head[match[2]]}.{i}.{match[3]}" for i in range(count)]

    def llama_cpp_names(self, name: str) -> list[str]:
        """Return llama.cpp's names of the tensors that hold a parameter: several for a `stacked` module.

        The experts of a layer share one name, because they are one tensor.
        """
        module, _, leaf = name.rpartition(".")
        layer, _, path = module.removeprefix(f"{self.layers}.").partition(".")
        parts = next((parts for parts, stacked in self.stacked.items() if stacked == path), None)
        return [self._single_name(name)] if parts is None else [f"blk.{layer}.{part}.{leaf}" for part in parts]

    def llama_cpp_name(self, name: str) -> str:
        """Return the first of `llama_cpp_names`."""
        return self.llama_cpp_names(name)[0]

    def _single_name(self, name: str) -> str:
        module, _, leaf = name.rpartition(".")
        match = re.fullmatch(rf"{re.escape(self.layers)}\.(\d+)\.(.+)", module)
        if match is None:
            return f"{_key_of(self.outside_layers, module)}.{leaf}"
        if expert := re.fullmatch(rf"{re.escape(self.experts)}\.\d+\.(\w+)", match[2]):
            return f"blk.{match[1]}.{_key_of(self.in_expert, expert[1])}_exps.{leaf}"
        if (path := f"{match[2]}.{leaf}") in self.in_layer.values():
            return f"blk.{match[1]}.{_key_of(self.in_layer, path)}"
        return f"blk.{match[1]}.{_key_of(self.in_layer, match[2])}.{leaf}"

    def _expert_name(self, layer: str, expert: int | str, module: str, leaf: str = "weight") -> str:
        return f"{self.layers}.{layer}.{self.experts}.{expert}.{module}.{leaf}"


def _key_of(names: Mapping[str, str], target: str) -> str:
    return next(key for key, value in names.items() if value == target)


OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GATED_MLP = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
MLP = {name: f"mlp.{hf_name}" for name, hf_name in GATED_MLP.items()}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

LLAMA = TensorLayout(
    OUTSIDE_LAYERS,
    {**PRE_NORMS, **ATTENTION, **MLP, "ffn_gate_inp": "block_sparse_moe.gate"},
    in_expert={"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"},
    experts="block_sparse_moe.experts",
)
QWEN3 = TensorLayout(
    OUTSIDE_LAYERS, {**PRE_NORMS, **ATTENTION, **HEAD_NORMS, **MLP, "ffn_gate_inp": "mlp.gate"}, in_expert=GATED_MLP
)
APERTUS = TensorLayout(
    OUTSIDE_LAYERS,
    {
        **{"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm", **ATTENTION, **HEAD_NORMS},
        **{"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    },
    arrays={
        **{f"xielu.{name}": (f"mlp.act_fn.{name}", (1,)) for name in ("alpha_p", "alpha_n")},
        **{f"xielu.{name}": (f"mlp.act_fn.{name}", ()) for name in ("beta", "eps")},
    },
)
GPT_OSS = TensorLayout(
    OUTSIDE_LAYERS,
    {
        "attn_norm": "input_layernorm",
        **ATTENTION,
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    in_expert=GATED_MLP,
)
GEMMA = TensorLayout(
    OUTSIDE_LAYERS,
    {
        "attn_norm": "input_layernorm",
        **ATTENTION,
        **HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        **MLP,
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
)
LAYER_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LAYER_INPUT = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA3N = TensorLayout(
    {**OUTSIDE_LAYERS, **LAYER_INPUTS},
    {
        **{**GEMMA.in_layer, **LAYER_INPUT},
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    numbered={"altup_proj": "model.altup_projections", "altup_unembd_proj": "model.altup_unembed_projections"},
)
GEMMA4 = TensorLayout(
    {**OUTSIDE_LAYERS, **LAYER_INPUTS},
    {
        **{**GEMMA.in_layer, **LAYER_INPUT},
        "layer_output_scale.weight": "layer_scalar",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    in_expert=GATED_MLP,
    joined_in_expert={"ffn_gate_up": ("gate_proj", "up_proj")},
    experts="experts",
)
PHI3 = TensorLayout(
    OUTSIDE_LAYERS,
    {**PRE_NORMS, "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", **FUSED_MLP},
    settings=(SHORT_FACTORS, LONG_FACTORS),
)
GLM4 = TensorLayout(
    OUTSIDE_LAYERS,
    {
        **PRE_NORMS,
        **ATTENTION,
        "post_attention_norm": "post_self_attn_layernorm",
        **FUSED_MLP,
        "post_ffw_norm": "post_mlp_layernorm",
    },
)
GLM = TensorLayout(OUTSIDE_LAYERS, {**PRE_NORMS, **ATTENTION, **FUSED_MLP})
CHATGLM2 = TensorLayout(
    {
        "token_embd": "transformer.embedding.word_embeddings",
        "output_norm": "transformer.encoder.final_layernorm",
        "output": "transformer.output_layer",
    },
    {
        **PRE_NORMS,
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    layers="transformer.encoder.layers",
    settings=(),
)
QWEN = TensorLayout(
    {"token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head"},
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_gate": "mlp.w2",
        "ffn_up": "mlp.w1",
        "ffn_down": "mlp.c_proj",
    },
    layers="transformer.h",
    settings=(),
)
NEXTN = {
    **{f"nextn.{part}": part for part in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    **{f"nextn.shared_head_{part}": f"shared_head.{part}" for part in ("head", "norm")},
}
"""The modules of layers for multi-token prediction."""
DEEPSEEK = TensorLayout(
    OUTSIDE_LAYERS,
    {
        **PRE_NORMS,
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_output": "self_attn.o_proj",
        **MLP,
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **{f"{name}_shexp": f"mlp.shared_experts.{hf_name}" for name, hf_name in GATED_MLP.items()},
        **NEXTN,
    },
    in_expert=GATED_MLP,
)
GPT2 = TensorLayout(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    layers="transformer.h",
    settings=(),
    transposed=("c_attn", "c_proj", "c_fc"),
)
STARCODER = replace(GPT2, transposed=())
MPT = TensorLayout(
    {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
    {
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
    layers="transformer.blocks",
    settings=(),
)
BLOOM = TensorLayout(
    {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        **PRE_NORMS,
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    layers="transformer.h",
    settings=(),
)
LFM2_EXPERT = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
LFM2 = TensorLayout(
    {
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",
        "output_norm": "model.embedding_norm",  # in some files
        "output": "lm_head",
    },
    {
        "attn_norm": "operator_norm",
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
        **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
        "attn_output": "self_attn.out_proj",
        **{f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")},
        "ffn_norm": "ffn_norm",
        **{name: f"feed_forward.{module}" for name, module in LFM2_EXPERT.items()},
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    },
    in_expert=LFM2_EXPERT,
    experts="feed_forward.experts",
    depthwise=("conv",),
)
QWEN35 = TensorLayout(
    OUTSIDE_LAYERS,
    {
        "attn_norm": "input_layernorm",
        **ATTENTION,
        **HEAD_NORMS,
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "post_attention_norm": "post_attention_layernorm",
        **MLP,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"{name}_shexp": f"mlp.shared_expert.{hf_name}" for name, hf_name in GATED_MLP.items()},
    },
    in_expert=GATED_MLP,
    depthwise=("conv1d",),
    norm_offset=1.0,
    plain_norms=("linear_attn.norm.weight",),
    divided={"ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a")},
)
QWEN3_NEXT = replace(
    QWEN35,
    in_layer={**QWEN35.in_layer, "ssm_ba": "linear_attn.in_proj_ba"},
    stacked={("attn_qkv", "attn_gate"): "linear_attn.in_proj_qkvz"},
)
"""For writing. Its files are read as Qwen3.5-MoE's, whose projections are separate."""
KIMI_LINEAR = TensorLayout(
    OUTSIDE_LAYERS,
    {
        **DEEPSEEK.in_layer,
        **ATTENTION,
        **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
        **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
        "ssm_beta": "self_attn.b_proj",
        "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias",
        "ssm_norm": "self_attn.o_norm",
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
        **{f"{name}_shexp": f"block_sparse_moe.shared_experts.{hf_name}" for name, hf_name in GATED_MLP.items()},
    },
    in_expert=LFM2_EXPERT,
    experts="block_sparse_moe.experts",
    depthwise=("q_conv1d", "k_conv1d", "v_conv1d"),
)
KIMI_LINEAR_OUTPUT = replace(KIMI_LINEAR, stacked={("attn_k_b", "attn_v_b"): "self_attn.kv_b_proj"})
"""For writing. halves.py reads both tensors."""
SSM = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
"""The modules of Mamba-2."""
GRANITE_HYBRID = TensorLayout(
    OUTSIDE_LAYERS,
    {
        **PRE_NORMS,
        **ATTENTION,
        **{name: f"mamba.{module}" for name, module in SSM.items()},
        "ffn_down": "shared_mlp.output_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
        "ffn_gate_inp": "block_sparse_moe.router.layer",
    },
    in_expert=GATED_MLP,
    experts="block_sparse_moe.experts",
    depthwise=("conv1d",),
    flat=(".A_log", ".D", "mamba.norm.weight"),
    stacked=dict.fromkeys((("ffn_gate", "ffn_up"), ("ffn_gate_shexp", "ffn_up_shexp")), "shared_mlp.input_linear"),
)
FALCON_H1 = TensorLayout(
    {**OUTSIDE_LAYERS, "output_norm": "model.final_layernorm"},
    {
        "attn_norm": "input_layernorm",
        **ATTENTION,
        **{name: f"mamba.{module}" for name, module in SSM.items()},
        "ffn_norm": "pre_ff_layernorm.weight",  # its name in files has no .weight
        **{name: f"feed_forward.{module}" for name, module in GATED_MLP.items()},
    },
    depthwise=("conv1d",),
    flat=(".A_log", ".D", "mamba.norm.weight"),
)
GRANITE_MIXTURE = replace(
    GRANITE_HYBRID,
    in_layer={name: module for name, module in GRANITE_HYBRID.in_layer.items() if name != "ffn_down"},
    stacked={("ffn_gate_shexp", "ffn_up_shexp"): "shared_mlp.input_linear"},
)
"""For writing."""
BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
MAMBA2 = TensorLayout(
    BACKBONE,
    {"attn_norm": "norm", **{name: f"mixer.{module}" for name, module in SSM.items()}},
    layers="backbone.layers",
    depthwise=("conv1d",),
    flat=(".A_log", ".D", "mixer.norm.weight"),
)
NEMOTRON_H = replace(
    MAMBA2,
    in_layer={
        **MAMBA2.in_layer,
        **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    in_expert={"ffn_up": "up_proj", "ffn_down": "down_proj"},
    experts="mixer.experts",
)
