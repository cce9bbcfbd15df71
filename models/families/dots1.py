"""dots.llm1 (arXiv 2506.05767): GLM-4.5 with norms of queries and keys, and with rotation of whole heads."""

from conf.errors import UserError
from models.config import ConfigReader
from models.decoder import read_decoder_config
from models.families.gemma2 import FULL, SLIDING, layer_windows
from models.families.glm4_moe import Glm4MoeConfig
from models.layers.grouped_moe import read_routing


def read_config(config: ConfigReader) -> Glm4MoeConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values, and for layers with a sliding window.
    """
    groups = config.count("n_group", 1), config.count("topk_group", 1)
    shape = read_decoder_config(config, 1e-6, 2048)
    has_window, first = config.raw("sliding_window", 4096) is not None, config.get("max_window_layers", int, 62)
    types = [SLIDING if has_window and i >= first else FULL for i in range(shape.num_hidden_layers)]
    if any(layer_windows(config, types, 4096)):
        raise UserError("config.json: sliding_window is not supported for dots1: only layers with full attention")
    config.expect("attention_bias", (False, None), None)
    return Glm4MoeConfig(
        **vars(shape),
        attention_bias=False,
        use_qk_norm=True,
        moe_intermediate_size=config.count("moe_intermediate_size"),
        n_shared_experts=config.count("n_shared_experts"),
        first_k_dense_replace=config.get("first_k_dense_replace", int, 0),
        num_nextn_predict_layers=0,
        routing=read_routing(config, groups, True, config.get("norm_topk_prob", bool, False)),
    )
