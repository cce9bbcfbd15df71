"""GPT-BigCode: SantaCoder (arXiv 2301.03988) and StarCoder (arXiv 2305.06161), GPT-2 with one key head for all queries.

T tokens, H query heads, G key/value heads, D channels per head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kernels.kv_store import kv_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.families.gpt2 import GPTLM, GPTConfig, read_shape
from models.layers.attention import Heads, attend
from models.layers.linear import Linear
from models.layers.module import Module
from models.layout import Unit

UNUSED = (
    *("inference_runner", "max_batch_size", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"),
    "scale_attention_softmax_in_fp32",
)
"""Keys without effect: settings of a runner of the first files, and the softmax, which is always in float32."""


@dataclass(frozen=True)
class GPTBigCodeConfig(GPTConfig):
    scale_attn_weights: bool


def read_config(config: ConfigReader) -> GPTBigCodeConfig:
    """Read config.json, with defaults as in transformers. Raises UserError for mistyped or unsupported values."""
    for key in UNUSED:
        config.raw(key)
    shape = read_shape(config, "gelu_pytorch_tanh")
    groups = 1 if config.get("multi_query", bool, True) else shape.num_attention_heads
    config.expect("num_key_value_heads", (groups, None), None)  # transformers 5 repeats it
    return GPTBigCodeConfig(
        **vars(shape) | {"num_key_value_heads": groups},
        scale_attn_weights=config.get("scale_attn_weights", bool, True),
    )


class Attention(Module):
    """A fused projection has all queries, the key and the value; with a key per query, these three of each head."""

    def __init__(self, c: GPTBigCodeConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
        self.head_dim, self.is_multi_query = c.head_dim, c.num_key_value_heads == 1
        self.scale = c.head_dim**-0.5 if c.scale_attn_weights else 1.0
        self.c_attn = Linear(c.hidden_size, sum(self.heads.fused) * c.head_dim)
        self.c_proj = Linear(c.hidden_size, c.hidden_size)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return [self.c_attn]

    def forward(self, x: Activations, angles: None, batch: Batch, cache: LayerCache) -> Tensor:
        fused = self.c_attn(x, batch)  # [T, (H + 2G) * D]
        if self.is_multi_query:
            query, key, value = fused.unflatten(-1, (-1, self.head_dim)).split(self.heads.fused, dim=1)
        else:
            query, key, value = fused.unflatten(-1, (-1, 3, self.head_dim)).unbind(2)  # [T, H, D] each
        kv_store(key, value, *cache, batch.slots)
        return self.c_proj(attend(query, cache, batch, self.scale), batch)


class GPTBigCode(GPTLM):
    def __init__(self, c: GPTBigCodeConfig) -> None:
        if c.num_key_value_heads > 1:
            self.layout = replace(self.layout, units={"c_attn": (Unit.QKV_HEAD,)})
        super().__init__(c, (Attention(c) for _ in range(c.num_hidden_layers)))
