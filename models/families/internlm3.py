"""InternLM3: Seed-OSS's decoder with other config keys for its biases."""

from models.config import ConfigReader
from models.decoder import read_decoder_config
from models.families.seed_oss import SeedOssConfig


def read_config(config: ConfigReader) -> SeedOssConfig:
    """Read config.json, with defaults as in the original code.

    Raises UserError for missing, mistyped or unsupported values.
    """
    bias = config.get("bias", bool, False)
    return SeedOssConfig(
        **vars(read_decoder_config(config, rms_norm_eps=1e-6, max_position_embeddings=32768)),
        attention_bias=config.get("qkv_bias", bool, False),
        attention_out_bias=bias,
        mlp_bias=bias,
    )
