"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention, in some layers DeepSeek's latent attention without position
encoding, and DeepSeek-V3's mixtures of experts.
"""

from dataclasses import dataclass, replace
from typing import Any

from conf.errors import UserError
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import DecoderLayer, PreNormLM
from models.families.deepseek import Deepseek, LatentAttention
from models.families.deepseek_config import LatentMoeConfig
from models.families.exaone_moe import read_sparse_layers
from models.families.mixtral import Expert, MixtralLayer
from models.layers.grouped_moe import GroupedMoE, read_routing
from models.layers.kimi_delta_attention import KimiDeltaAttention
from models.layers.layer_types import FULL, LINEAR, check_layer_types, read_num_taps
from models.layers.mlp import MLP

UNUSED = """
head_dim num_nextn_predict_layers qk_head_dim rope_parameters rope_scaling rope_theta use_grouped_topk
""".split()
"""Keys without effect: no layer has positions, and no published model has multi-token prediction layers."""


@dataclass(frozen=True)
class KimiLinearConfig(LatentMoeConfig):
    max_tokens: int
    is_recurrent: tuple[bool, ...]
    """For each layer."""
    is_sparse: tuple[bool, ...]
    """For each layer, whether it is a mixture of experts."""
    num_delta_heads: int
    delta_channels: int
    """The channels of a head of Kimi Delta Attention."""
    num_taps: int

    @property
    def context_length(self) -> int:
        return self.max_tokens

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, is_recurrent=any(self.recurrent_layers))

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return self.is_sparse[: self.num_hidden_layers]

    @property
    def recurrent_layers(self) -> tuple[bool, ...]:
        return self.is_recurrent[: self.num_hidden_layers]


def read_config(config: ConfigReader) -> KimiLinearConfig:
    """Read config.json of Moonshot AI or of transformers.

    Raises UserError for missing, mistyped or unsupported values, and for contradicting kinds of layers.
    """
    config.activation(("silu",), "silu")
    for key, supported in (
        ("mla_use_nope", (True, None)),
        ("moe_layer_freq", (1, None)),
        ("moe_router_activation_func", ("sigmoid", None)),
        ("num_key_value_heads", (config.count("num_attention_heads"), None)),
    ):
        config.expect(key, supported, None)
    for key in UNUSED:
        config.raw(key)
    config.positive("routed_scaling_factor")  # the defaults of transformers and of Moonshot AI differ
    num_layers, groups = config.num_layers(), (config.count("num_expert_group", 1), config.count("topk_group", 1))
    keys = ("num_experts", "num_experts_per_token", "num_expert_group")
    num_heads, head_channels, num_taps, types = _read_delta(config, num_layers)
    return KimiLinearConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size"),
        moe_intermediate_size=config.count("moe_intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=config.count("num_attention_heads"),
        q_lora_rank=None if config.raw("q_lora_rank") is None else config.count("q_lora_rank"),
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_nope_head_dim=config.count("qk_nope_head_dim"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        v_head_dim=config.count("v_head_dim"),
        n_shared_experts=config.count("num_shared_experts", 1),
        rms_norm_eps=config.positive("rms_norm_eps", 1e-5),
        attention_bias=config.get("attention_bias", bool, False),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        routing=read_routing(config, groups, True, config.get("moe_renormalize", bool, True), keys),
        max_tokens=config.count("model_max_length", 2**20),
        is_recurrent=check_layer_types(types, LINEAR, num_layers),
        is_sparse=read_sparse_layers(config, num_layers),
        num_delta_heads=num_heads,
        delta_channels=head_channels,
        num_taps=num_taps,
    )


def _read_delta(config: ConfigReader, num_layers: int) -> tuple[int, int, int, Any]:
    """Return the heads of Kimi Delta Attention, their channels, its taps, and the layer types."""
    section, types = config.section("linear_attn_config"), config.raw("layer_types")
    if section is None:
        numbers = config.count("linear_num_heads", 32), config.count("linear_head_dim", 128)
        if types is None:
            types = [FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)]
        return *numbers, read_num_taps(config, "linear_conv_kernel_dim"), types
    if types is None:
        types = _types_of_numbers(section.raw("full_attn_layers"), section.raw("kda_layers"), num_layers)
    numbers = section.count("num_heads"), section.count("head_dim")
    return *numbers, read_num_taps(section, "short_conv_kernel_size"), types


def _types_of_numbers(full: Any, linear: Any, num_layers: int) -> list[str]:
    """Return the layer types. `full`, `linear`: the numbers of their layers, from 1 on."""
    numbers = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    if any(type(number) is not int for number in numbers) or sorted(numbers) != [*range(1, num_layers + 1)]:
        problem = f"config.json: linear_attn_config: full_attn_layers={full!r} and kda_layers={linear!r}"
        raise UserError(f"{problem} are not the layers from 1 to num_hidden_layers={num_layers}, each once")
    return [FULL if number in full else LINEAR for number in range(1, num_layers + 1)]


def _make_layer(c: KimiLinearConfig, is_recurrent: bool, is_sparse: bool) -> DecoderLayer:
    sizes = c.num_delta_heads, c.delta_channels, c.num_taps
    mixer = KimiDeltaAttention(c.hidden_size, *sizes, c.rms_norm_eps) if is_recurrent else LatentAttention(c)
    if not is_sparse:
        return DecoderLayer(c, mixer, MLP(c.hidden_size, c.intermediate_size))
    mixture = GroupedMoE(c.hidden_size, c.moe_intermediate_size, c.n_shared_experts, c.routing, Expert)
    return MixtralLayer(c, mixer, mixture)


class KimiLinear(PreNormLM):
    config: KimiLinearConfig
    layout = replace(
        Deepseek.layout,
        recurrent="self_attn",
        scale_fold_targets={"w2": "w3", "down_proj": "up_proj"},
        row_parallel=("o_proj", "down_proj", "w2"),
        replicated=("q_a_proj", "kv_a_proj_with_mqa", "f_a_proj", "g_a_proj"),
    )
    float32_tensors = ("A_log", "dt_bias", "e_score_correction_bias", "block_sparse_moe.gate.weight")

    def __init__(self, c: KimiLinearConfig) -> None:
        kinds = zip(c.recurrent_layers, c.layer_kinds, strict=True)
        super().__init__(c, (_make_layer(c, *kind) for kind in kinds), None)
