"""GPT-2 and models of its architecture.

T tokens, H heads, D channels per head, E hidden channels, F feed-forward channels, V vocabulary, R output rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from kernels.gelu import gelu, gelu_tanh
from kernels.kv_store import kv_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM, ModelShape
from models.config import ConfigReader
from models.layers.attention import Heads, attend
from models.layers.embedding import Embedding
from models.layers.linear import Linear, make_head
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layout import ModelLayout, Unit

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": gelu,
}


@dataclass(frozen=True)
class GPT2Config(ModelShape):
    n_embd: int
    n_inner: int
    num_attention_heads: int
    head_dim: int
    n_positions: int
    layer_norm_epsilon: float
    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool
    activation_function: str

    @property
    def context_length(self) -> int:
        return self.n_positions


def read_config(config: ConfigReader) -> GPT2Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.expect("add_cross_attention", (False,), False)
    n_embd, heads = config.count("n_embd"), config.count("n_head")
    config.check_multiple("n_embd", n_embd, "n_head", heads)
    return GPT2Config(
        vocab_size=config.count("vocab_size"),
        n_embd=n_embd,
        n_inner=config.count("n_inner", 4 * n_embd),
        num_hidden_layers=config.num_layers("n_layer"),
        num_attention_heads=heads,
        head_dim=n_embd // heads,
        n_positions=config.count("n_positions", 1024),
        layer_norm_epsilon=config.positive("layer_norm_epsilon", 1e-5),
        scale_attn_weights=config.get("scale_attn_weights", bool, True),
        scale_attn_by_inverse_layer_idx=config.get("scale_attn_by_inverse_layer_idx", bool, False),
        activation_function=config.expect("activation_function", tuple(ACTIVATIONS), "gelu_new"),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
    )


class Attention(Module):
    def __init__(self, c: GPT2Config, index: int) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_attention_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            self.scale /= index + 1
        self.c_attn = Linear(c.n_embd, 3 * c.n_embd, is_transposed=True)
        self.c_proj = Linear(c.n_embd, c.n_embd, is_transposed=True)

    def forward(self, x: Activations, batch: Batch, cache: LayerCache) -> Tensor:
        query, key, value = self.c_attn(x, batch).unflatten(-1, (3, -1, self.head_dim)).unbind(1)  # [T, H, D] each
        kv_store(key, value, *cache, batch.slots)
        return self.c_proj(attend(query, cache, batch, self.scale), batch)


class MLP(Module):
    def __init__(self, c: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Linear(c.n_embd, c.n_inner, is_transposed=True)
        self.c_proj = Linear(c.n_inner, c.n_embd, is_transposed=True)
        self.activation = ACTIVATIONS[c.activation_function]

    def forward(self, x: Activations, batch: Batch) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(x, batch)), batch)


class Block(Module):
    def __init__(self, c: GPT2Config, index: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(c.n_embd, c.layer_norm_epsilon)
        self.attn = Attention(c, index)
        self.ln_2 = LayerNorm(c.n_embd, c.layer_norm_epsilon)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        x = batch.attending(x) + self.attn(self.ln_1(x, [self.attn.c_attn]), batch, cache)
        return x + self.mlp(self.ln_2(x, [self.mlp.c_fc]), batch)


class Transformer(Module):
    def __init__(self, c: GPT2Config) -> None:
        super().__init__()
        self.wte = Embedding(c.vocab_size, c.n_embd)
        self.wpe = Embedding(c.n_positions, c.n_embd)
        self.h = nn.ModuleList(Block(c, index) for index in range(c.num_hidden_layers))
        self.ln_f = LayerNorm(c.n_embd, c.layer_norm_epsilon)


class GPT2(CausalLM):
    layout = ModelLayout(
        embedding="transformer.wte",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attention="attn",
        norms=("ln_1", "ln_2"),
        scale_fold_targets={},
        row_parallel=("c_proj",),
        replicated=("wpe",),
        units={"c_attn": (Unit.QUERY_HEAD, Unit.KEY_VALUE_HEAD, Unit.KEY_VALUE_HEAD)},
    )

    def __init__(self, c: GPT2Config) -> None:
        super().__init__(c)
        self.transformer = Transformer(c)
        self.lm_head = make_head(self.transformer.wte, c.tie_word_embeddings)

    def embed(self, batch: Batch) -> Tensor:
        return self.transformer.wte(batch.token_ids) + self.transformer.wpe(batch.positions)
