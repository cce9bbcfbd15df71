"""Attention of Gemma 4, whose layers have different heads and may share keys and values.

T tokens, H query heads, G key/value heads, D channels per head.
"""

from torch import Tensor

from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from kernels.rope import rope
from models.batch import Batch, LayerCache
from models.families.gemma4_config import Gemma4Config
from models.layers.attention import Heads, attend
from models.layers.linear import Linear, MergedLinear
from models.layers.module import Module
from models.layers.norm import RMSNorm, WeightlessRMSNorm
from models.layers.rotary import AnglesByLayer

IN_FLOAT32 = 0.0  # a norm rounds once, after the weight, as `rms_norm` does with an offset


class Attention(Module):
    """Attention without a scale, with norms of queries, keys and values.

    A layer that shares the keys and values of an earlier layer has queries alone.
    """

    def __init__(self, c: Gemma4Config, number: int) -> None:
        super().__init__()
        (num_groups, head_dim), self.window = c.layer_heads[number], c.windows[number]
        self.heads = Heads(c.num_attention_heads, num_groups, head_dim, head_dim)
        self.head_dim, self.stores = head_dim, number < c.first_sharing
        outputs = {"q_proj": c.num_attention_heads * head_dim}
        if self.stores:
            outputs |= {"k_proj": num_groups * head_dim}
            if self.window is not None or not c.keys_are_values:
                outputs |= {"v_proj": num_groups * head_dim}
        self.qkv = MergedLinear(
            self, {name: Linear(c.hidden_size, size, c.attention_bias) for name, size in outputs.items()}
        )
        self.o_proj = Linear(c.num_attention_heads * head_dim, c.hidden_size, c.attention_bias)
        self.q_norm = RMSNorm(head_dim, c.rms_norm_eps, IN_FLOAT32)
        if self.stores:
            self.k_norm = RMSNorm(head_dim, c.rms_norm_eps, IN_FLOAT32)
            self.v_norm = WeightlessRMSNorm(head_dim, c.rms_norm_eps)

    @property
    def readers(self) -> tuple[Linear, ...]:
        """The linear layers that read the norm before this module."""
        return self.qkv.layers

    def fuse(self) -> None:
        self.qkv.merge()

    def forward(self, x: Activations, angles: AnglesByLayer, batch: Batch, cache: LayerCache) -> Tensor:
        projected = [y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv(x, batch)]  # [T, H, D], then [T, G, D]
        query = _per_head(self.q_norm, projected[0])
        if self.stores:
            key, value = _per_head(self.k_norm, projected[1]), _per_head(self.v_norm, projected[-1])
            query = rope_and_store(query, key, value, *angles.of(self.window), *cache, batch.slots)
        else:
            query = rope(query, *angles.of(self.window))
        return self.o_proj(attend(query, cache, batch, 1.0, window=self.window), batch)


def _per_head(norm: RMSNorm | WeightlessRMSNorm, x: Tensor) -> Tensor:
    """Return the norm of each head of x [T, H, D]."""
    normed = norm(x.flatten(0, 1))
    assert isinstance(normed, Tensor)
    return normed.view(x.shape)
