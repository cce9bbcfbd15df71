"""The gated attention of Qwen3-Next and Qwen3.5 (arXiv 2505.06708).

T tokens, R output rows, E hidden channels, H query heads, G key/value heads, D channels per head.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from kernels.sigmoid_gate import sigmoid_gate
from models.batch import Batch, LayerCache
from models.layers.attention import Heads, attend
from models.layers.linear import Linear, MergedLinear
from models.layers.module import Module
from models.layers.norm import RMSNorm
from models.layers.rotary import Angles


class GatedAttention(Module):
    """Grouped-query attention with norms of queries and keys. A gate multiplies its outputs."""

    def __init__(self, hidden_size: int, heads: Heads, eps: float, norm_weight_offset: float | None) -> None:
        """`eps` and `norm_weight_offset`: of the norms, as of `RMSNorm`."""
        super().__init__()
        self.heads = heads
        queries, keys = heads.num_attention_heads * heads.head_dim, heads.num_key_value_heads * heads.head_dim
        outputs = {"q_proj": 2 * queries, "k_proj": keys, "v_proj": keys}  # a query and its gate, for each head
        layers = {name: Linear(hidden_size, size, bias=False) for name, size in outputs.items()}
        self.qkv = MergedLinear(self, layers)
        self.q_norm = RMSNorm(heads.head_dim, eps, norm_weight_offset)
        self.k_norm = RMSNorm(heads.head_dim, eps, norm_weight_offset)
        self.o_proj = Linear(queries, hidden_size, bias=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return self.qkv.layers

    def fuse(self) -> None:
        self.qkv.merge()

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        head_dim = self.heads.head_dim
        gated_query, key, value = (y.unflatten(-1, (-1, head_dim)) for y in self.qkv(x, batch))
        query, gate = gated_query.unflatten(1, (-1, 2)).unbind(2)  # [T, H, D] each
        query = rope_and_store(self.q_norm(query), self.k_norm(key), value, *angles, *cache, batch.slots)
        attended = attend(query, cache, batch, head_dim**-0.5)
        return self.o_proj(sigmoid_gate(attended, batch.attending(gate).flatten(1)), batch)
