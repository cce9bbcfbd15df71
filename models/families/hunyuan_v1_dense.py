"""Hunyuan v1, dense (0.5B to 7B): Llama with a norm on each head's rotated query and key.

T tokens, H query heads, G key/value heads, D channels per head.
"""

from torch import Tensor

from conf.errors import UserError
from kernels.kv_store import kv_store
from kernels.rope import rope
from models import decoder
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderLayer, DecoderLM, read_decoder_config
from models.families.llama import LlamaConfig
from models.layers.mlp import MLP
from models.layers.norm import RMSNorm
from models.layers.rotary import Angles, RotaryConfig, read_rotary_config

UNUSED = """
add_classification_head attention_head_dim cla_share_factor class_num dense_list eod_token_id eos_token_list group_limited_greedy
im_end_id im_newline_id im_start_id image_token_id kv_lora_rank mask_init_id mlp_bias norm_type org_vocab_size pad_id pool_type
position_embedding_xdrope q_lora_rank qk_nope_head_dim qk_rope_head_dim sep_token_id skip_cls_token text_end_id
text_start_id use_rotary_pos_emb v_head_dim video_end_id video_start_id vision_start_id vit_path
""".split()
"""Keys in the hub's files for other models of the same code. No model of this architecture reads them."""
SUPPORTED = {"use_cla": (False, None), "use_mla": (False, None), "use_qk_norm": (True, None)}


def read_config(config: ConfigReader) -> LlamaConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    for key, values in SUPPORTED.items():
        config.expect(key, values, None)
    for key in UNUSED:
        config.raw(key)
    return LlamaConfig(
        **vars(read_decoder_config(config, 1e-5, 2048, _read_rotary)),
        attention_bias=config.get("attention_bias", bool, False),
        mlp_bias=False,
    )


def _read_rotary(config: ConfigReader, head_dim: int, max_position_embeddings: int) -> RotaryConfig:
    """Read the rotary settings. A scaling with `alpha` only multiplies the base of the frequencies."""
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    if scaling is None or scaling.raw("alpha") is None:
        return read_rotary_config(config, head_dim, max_position_embeddings)
    is_old = scaling.raw("type") is not None and scaling.raw("rope_type") is None
    scaling.expect("type" if is_old else "rope_type", ("dynamic",), None)
    if head_dim == 2:
        raise UserError("config.json: rope_scaling: alpha needs a head_dim above 2")
    theta = scaling.positive("rope_theta", config.positive("rope_theta", 10000.0))
    stretch = scaling.positive("alpha") ** (head_dim / (head_dim - 2))
    return RotaryConfig(head_dim, max_position_embeddings, theta * stretch)


class Attention(decoder.Attention):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
        self.query_layernorm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.key_layernorm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        query = self.query_layernorm(rope(query, *angles))  # [T, H, D]
        kv_store(self.key_layernorm(rope(key, *angles)), value, *cache, batch.slots)
        return query


class HunyuanDense(DecoderLM):
    def __init__(self, c: LlamaConfig) -> None:
        layers = (
            DecoderLayer(c, Attention(c), MLP(c.hidden_size, c.intermediate_size)) for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers)
