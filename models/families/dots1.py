"""dots.llm1 (arXiv 2506.05767): GLM-4.5 with norms of queries and keys, with rotation of whole heads, and with windows."""

from dataclasses import dataclass

from models.config import ConfigReader
from models.decoder import WindowedConfig, read_decoder_config
from models.families import qwen3
from models.families.gemma2 import FULL, SLIDING, layer_windows
from models.families.glm4_moe import Glm4Moe, Glm4MoeConfig
from models.layers.grouped_moe import read_routing


@dataclass(frozen=True)
class Dots1Config(Glm4MoeConfig, WindowedConfig):
    pass


def read_config(config: ConfigReader) -> Dots1Config:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    groups = config.count("n_group", 1), config.count("topk_group", 1)
    shape = read_decoder_config(config, 1e-6, 2048)
    has_window, first = config.raw("sliding_window", 4096) is not None, config.get("max_window_layers", int, 62)
    types = [SLIDING if has_window and i >= first else FULL for i in range(shape.num_hidden_layers)]
    return Dots1Config(
        **vars(shape),
        windows=layer_windows(config, types, 4096),
        attention_bias=config.get("attention_bias", bool, False),
        use_qk_norm=True,
        moe_intermediate_size=config.count("moe_intermediate_size"),
        n_shared_experts=config.count("n_shared_experts"),
        first_k_dense_replace=config.get("first_k_dense_replace", int, 0),
        num_nextn_predict_layers=0,
        routing=read_routing(config, groups, True, config.get("norm_topk_prob", bool, False)),
    )


class Dots1(Glm4Moe):
    def __init__(self, c: Dots1Config) -> None:
        bias = c.attention_bias
        super().__init__(c, (qwen3.Attention(c, window, qkv_bias=bias, o_bias=bias) for window in c.windows))
