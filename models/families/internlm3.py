"""InternLM3, from config.json: Seed-OSS's decoder, whose biases have other keys here."""

from models.config import ConfigReader
from models.decoder import read_decoder_config
from models.families.seed_oss import SeedOssConfig


def read_config(config: ConfigReader) -> SeedOssConfig:
    """Raises UserError for a missing key, a wrong type, or a value that this file does not implement. Defaults are its own code's."""
    bias = config.get("bias", bool, False)
    return SeedOssConfig(
        **vars(read_decoder_config(config, rms_norm_eps=1e-6, max_position_embeddings=32768)),
        attention_bias=config.get("qkv_bias", bool, False),
        attention_out_bias=bias,
        mlp_bias=bias,
    )
