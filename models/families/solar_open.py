"""Solar Open 100B: GLM-4.5 without norms of queries and keys, with a mixture in every layer and rotation of whole heads."""

from functools import partial

from models.config import ConfigReader
from models.decoder import read_decoder_config
from models.families.glm4_moe import Glm4MoeConfig
from models.layers.grouped_moe import read_routing
from models.layers.rotary import read_rotary_config


def read_config(config: ConfigReader) -> Glm4MoeConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    groups = config.count("n_group", 1), config.count("topk_group", 1)
    for key in ("intermediate_size", "moe_layer_freq"):  # of dense layers, which the model does not have
        config.raw(key)
    for key, supported in (("first_k_dense_replace", (0, None)), ("use_qk_norm", (False, None))):
        config.expect(key, supported, None)
    experts = config.count("moe_intermediate_size")
    read_rotary = partial(read_rotary_config, partial_rotary_factor=1.0, default_theta=1e6)
    shape = read_decoder_config(config, 1e-5, 131072, read_rotary, intermediate_size=experts)
    return Glm4MoeConfig(
        **vars(shape),
        attention_bias=config.get("attention_bias", bool, False),
        use_qk_norm=False,
        moe_intermediate_size=experts,
        n_shared_experts=config.count("n_shared_experts", 1),
        first_k_dense_replace=0,
        num_nextn_predict_layers=0,
        routing=read_routing(config, groups, True, config.get("norm_topk_prob", bool, True)),
    )
