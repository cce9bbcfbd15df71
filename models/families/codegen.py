"""CodeGen (arXiv 2203.13474): GPT-J with a fused projection in four blocks, each of queries, values and keys.

T tokens, H heads, D channels per head.
"""

from dataclasses import replace

from torch import Tensor

from kernels.kv_store import rope_and_store
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.families import gptj
from models.families.gptj import GPTJLM, GPTJConfig
from models.layers.attention import Heads, attend
from models.layers.linear import Linear
from models.layers.module import Module
from models.layers.rotary import Angles

NUM_BLOCKS = 4  # the cores of the accelerators that trained the model


def read_config(config: ConfigReader) -> GPTJConfig:
    """Read config.json, with defaults as in transformers. Raises UserError for mistyped or unsupported values."""
    shape = gptj.read_config(config)
    config.check_multiple("n_head", shape.num_attention_heads, "the blocks of qkv_proj", NUM_BLOCKS)
    return shape


class Attention(Module):
    """Each rank computes the queries, values and keys of all heads, because its heads are in several blocks."""

    def __init__(self, c: GPTJConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_attention_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.qkv_proj = Linear(c.hidden_size, 3 * c.hidden_size, bias=False)
        self.out_proj = Linear(c.hidden_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        blocks = self.qkv_proj(x, batch).unflatten(-1, (NUM_BLOCKS, 3, -1, self.head_dim))  # [T, 4, 3, H/4, D]
        query, value, key = (self.heads.slice_keys(part.flatten(1, 2), 1) for part in blocks.unbind(2))  # [T, H, D]
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots, interleaved=True)
        return self.out_proj(attend(query, cache, batch, self.head_dim**-0.5), batch)


class CodeGen(GPTJLM):
    layout = replace(GPTJLM.layout, replicated=("qkv_proj",), units={})

    def __init__(self, c: GPTJConfig) -> None:
        super().__init__(c, (Attention(c) for _ in range(c.num_hidden_layers)))
