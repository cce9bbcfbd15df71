"""Nemotron-H, Nemotron Nano 2 and 3: each layer is Mamba-2, attention, a feed-forward layer or a mixture of experts.

T tokens, E hidden channels, L latent channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from conf.errors import UserError
from models.batch import Batch, LayerCache, LayerState
from models.config import ConfigReader
from models.decoder import MixerLayer, NoPEAttention, PreNormLM, RecurrentConfig
from models.layers.grouped_moe import Gate, Routing, read_routing
from models.layers.layer_types import FULL, LINEAR, agreed_types, renamed_types
from models.layers.linear import Linear
from models.layers.mamba2 import Mamba2, Mamba2Config, read_heads_mamba2
from models.layers.mlp import SquaredReluMLP
from models.layers.module import Module
from models.layers.moe import Experts
from models.layers.norm import ResidualStream
from models.layers.rotary import Angles, RotaryConfig
from models.layout import ModelLayout

MLP, MIXTURE = "mlp", "moe"
PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": MIXTURE}
"""Layer types by the letters of hybrid_override_pattern."""
WITHOUT_EFFECT = """
chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype moe_intermediate_size moe_shared_expert_intermediate_size
moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type n_group n_routed_experts n_shared_experts
norm_topk_prob num_experts_per_tok num_logits_to_keep num_nextn_predict_layers rescale_prenorm_residual rms_norm_eps
routed_scaling_factor time_step_floor time_step_max time_step_min time_step_rank topk_group use_mamba_kernels
""".split()
"""Keys of training, of other implementations, of multi-token prediction, and of experts in a model that has none.

NVIDIA's code does not limit time steps by time_step_min. transformers does, in prompts only.
"""


@dataclass(frozen=True)
class Mixtures:
    routing: Routing
    intermediate_size: int
    shared_intermediate_size: int
    latent_size: int | None
    """The channels that the experts read and write. None: the hidden channels."""


@dataclass(frozen=True)
class NemotronHConfig(RecurrentConfig):
    layer_types: tuple[str, ...]
    mamba: Mamba2Config
    mlp_bias: bool
    mixtures: Mixtures | None

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        return self.layer_types[: self.num_hidden_layers]


def read_config(config: ConfigReader) -> NemotronHConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values, and for contradicting layer types.
    """
    for key in WITHOUT_EFFECT:
        config.raw(key)
    for key, supported in (
        ("mlp_hidden_act", ("relu2", None)),
        ("mamba_hidden_act", ("silu", None)),
        ("sliding_window", (None,)),
        ("attention_bias", (False, None)),
        ("residual_in_fp32", (False, None)),
    ):
        config.expect(key, supported, None)
    types, heads = _read_types(config), config.count("num_attention_heads")
    groups, hidden_size = config.count("num_key_value_heads", heads), config.count("hidden_size")
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    head_dim, eps = config.count("head_dim", 128), config.positive("layer_norm_epsilon", 1e-5)
    return NemotronHConfig(
        vocab_size=config.count("vocab_size"),
        num_hidden_layers=len(types),
        num_key_value_heads=groups,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size", 21504),
        num_attention_heads=heads,
        rms_norm_eps=eps,
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        rotary=RotaryConfig(head_dim, config.count("max_position_embeddings", 4096)),  # nothing is rotated
        is_recurrent=tuple(kind == LINEAR for kind in types),
        layer_types=types,
        mamba=read_heads_mamba2(config, "mamba_", "ssm_state_size", eps),
        mlp_bias=config.get("mlp_bias", bool, False),
        mixtures=_read_mixtures(config) if MIXTURE in types else None,
    )


def _read_types(config: ConfigReader) -> tuple[str, ...]:
    """Return the type of each layer. transformers writes a list, NVIDIA's files a text with a letter for each layer."""
    pattern, types = config.get("hybrid_override_pattern", str, ""), renamed_types(config.raw("layers_block_type"))
    of_pattern = [PATTERN.get(letter, letter) for letter in pattern] or None
    types = agreed_types(config, "layers_block_type", types, "hybrid_override_pattern", of_pattern)
    if not isinstance(types, list) or not types:
        raise UserError(f"config.json: layers_block_type={types!r} is not a list of layer types")
    if unknown := [kind for kind in types if kind not in PATTERN.values()]:
        supported = ", ".join(map(repr, PATTERN.values()))
        raise UserError(f"config.json: a layer is {unknown[0]!r}, which is not supported: only {supported}")
    if (number := config.raw("num_hidden_layers", len(types))) != len(types):
        raise UserError(f"config.json: num_hidden_layers={number!r} contradicts its {len(types)} layer types")
    return tuple(types)


def _read_mixtures(config: ConfigReader) -> Mixtures:
    config.expect("n_shared_experts", (1, None), None)
    groups = config.count("n_group", 1), config.count("topk_group", 1)
    return Mixtures(
        routing=read_routing(config, groups, True, config.get("norm_topk_prob", bool, True)),
        intermediate_size=config.count("moe_intermediate_size"),
        shared_intermediate_size=config.count("moe_shared_expert_intermediate_size"),
        latent_size=None if config.raw("moe_latent_size") is None else config.count("moe_latent_size"),
    )


class MixtureLayer(Module):
    """K routed experts per token, which may read and write latent channels, and a shared expert for all tokens."""

    readers: Sequence[Linear] = ()
    """Empty, because router and experts read floats."""

    def __init__(self, hidden_size: int, c: Mixtures, bias: bool) -> None:
        super().__init__()
        self.gate = Gate(hidden_size, c.routing)
        channels = c.latent_size or hidden_size
        experts = (SquaredReluMLP(channels, c.intermediate_size, bias) for _ in range(c.routing.num_experts))
        self.experts = Experts(experts, c.routing.num_experts_per_tok)
        self.shared_experts = SquaredReluMLP(hidden_size, c.shared_intermediate_size, bias)
        self.has_latent = c.latent_size is not None
        if self.has_latent:
            self.fc1_latent_proj = Linear(hidden_size, channels, bias)
            self.fc2_latent_proj = Linear(channels, hidden_size, bias)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        """x and the result are [T, E]."""
        weights, chosen = self.gate(x)
        latent = self.fc1_latent_proj(x, batch) if self.has_latent else x  # [T, L]
        routed: Tensor = self.experts(latent, weights, chosen)
        if self.has_latent:
            routed = self.fc2_latent_proj(routed, batch)
        shared: Tensor = self.shared_experts(x, batch)
        return routed + shared


class FeedForwardLayer(MixerLayer):
    """A layer whose mixer computes each token alone."""

    def forward(
        self, stream: ResidualStream, angles: Angles | None, batch: Batch, cache: LayerCache | LayerState
    ) -> ResidualStream:
        norm, mixer = self.parts
        attending = (None if part is None else batch.attending(part) for part in stream)
        normed, x = norm(*attending, mixer.readers)
        return ResidualStream(x, mixer(normed, batch))


def make_layer(c: NemotronHConfig, kind: str) -> MixerLayer:
    if kind == LINEAR:
        return MixerLayer(c, Mamba2(c.hidden_size, c.mamba))
    if kind == FULL:
        return MixerLayer(c, NoPEAttention(c))
    if kind == MLP:
        return FeedForwardLayer(c, SquaredReluMLP(c.hidden_size, c.intermediate_size, c.mlp_bias))
    assert c.mixtures is not None
    return FeedForwardLayer(c, MixtureLayer(c.hidden_size, c.mixtures, c.mlp_bias))


class NemotronH(PreNormLM):
    layout = ModelLayout(
        embedding="backbone.embeddings",
        layers="backbone.layers",
        final_norm="backbone.norm_f",
        attention="mixer",
        recurrent="mixer",
        norms=("norm",),
        scale_fold_targets={"o_proj": "v_proj"},
        row_parallel=("o_proj", "out_proj", "down_proj"),
        replicated=("fc1_latent_proj", "fc2_latent_proj"),
    )
    float32_tensors = ("A_log", "dt_bias", "mixer.D", "e_score_correction_bias", "mixer.gate.weight")

    def __init__(self, c: NemotronHConfig) -> None:
        super().__init__(c, (make_layer(c, kind) for kind in c.layer_kinds), None)

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        return ("mtp.",)  # the multi-token prediction layers
