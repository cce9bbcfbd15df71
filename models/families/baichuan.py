"""Baichuan 7B and 13B, Baichuan 2 7B and 13B. config.json states neither the size nor the version.

T tokens, H heads, D channels per head, E hidden channels, V vocabulary, R output rows.
The 7B models use rotary embedding, and their config has `max_position_embeddings`. The 13B models use ALiBi, and their
config has only `model_max_length`. The head of Baichuan 2 has unit rows; `read_version` detects the version.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from conf.errors import UserError
from kernels.kv_store import kv_store, rope_and_store
from kernels.linear import linear
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderLayer, PreNormLM, PreNormShape
from models.layers.attention import Heads, alibi_slopes, attend
from models.layers.constant import Constant
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.rotary import Angles, RotaryConfig, RotaryEmbedding
from models.layout import ModelLayout, Unit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaichuanConfig(PreNormShape):
    intermediate_size: int
    num_attention_heads: int
    head_dim: int
    max_length: int
    alibi: bool
    normalised_head: bool

    @property
    def context_length(self) -> int:
        return self.max_length


def read_version(config: ConfigReader) -> int:
    """Return the version, 1 or 2.

    Signs in config.json are the vocabulary size of the released models, the class name BaiChuan, which only Baichuan-7B
    has, and `tokenizer_class` and `z_loss_weight`, which only Baichuan 2 has. Without a sign the version is 1, and a
    warning is logged. Raises UserError for contradictory signs.
    """
    vocab_size = config.count("vocab_size")
    architectures, tokenizer = config.raw("architectures"), config.raw("tokenizer_class")
    signs = {
        f"vocab_size={vocab_size}": {64000: 1, 125696: 2}.get(vocab_size),
        f"architectures={architectures}": 1 if architectures == ["BaiChuanForCausalLM"] else None,
        f"tokenizer_class={tokenizer}": 2 if tokenizer == "BaichuanTokenizer" else None,
        "z_loss_weight": 2 if config.raw("z_loss_weight") is not None else None,
    }
    versions = {sign: version for sign, version in signs.items() if version is not None}
    if len(set(versions.values())) > 1:
        texts = (f"{sign} is of Baichuan {version}" for sign, version in versions.items())
        raise UserError(f"config.json contradicts itself: {', '.join(texts)}: take out what does not belong there")
    if not versions:
        log.warning(
            "config.json does not say of which Baichuan it is: taken for Baichuan 1, whose head is not normalised "
            '(for Baichuan 2 add "tokenizer_class": "BaichuanTokenizer")'
        )
    return next(iter(versions.values()), 1)


def read_config(config: ConfigReader) -> BaichuanConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.activation(("silu",), "silu")
    config.expect("tie_word_embeddings", (False,), False)
    config.expect("rope_theta", (None, 10000), None)
    config.expect("rope_scaling", (None,), None)
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    config.check_multiple("hidden_size", hidden_size, "num_attention_heads", heads)
    alibi = config.raw("max_position_embeddings") is None
    if hidden_size // heads % 2 and not alibi:
        raise UserError(
            f"config.json: hidden_size={hidden_size} over num_attention_heads={heads} is odd, "
            "but rotary embedding turns pairs of channels"
        )
    return BaichuanConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_hidden_layers=config.num_layers(),
        tie_word_embeddings=False,
        num_attention_heads=heads,
        head_dim=hidden_size // heads,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        max_length=config.count("model_max_length" if alibi else "max_position_embeddings"),
        alibi=alibi,
        normalised_head=read_version(config) == 2,
    )


class Attention(Module):
    def __init__(self, c: BaichuanConfig, slopes: Constant | None) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_attention_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.slopes = slopes  # [H]
        self.W_pack = Linear(c.hidden_size, 3 * c.hidden_size, bias=False)
        self.o_proj = Linear(c.hidden_size, c.hidden_size, bias=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return [self.W_pack]

    def forward(self, x: Activations, angles: Angles | None, batch: Batch, cache: LayerCache) -> Tensor:
        query, key, value = self.W_pack(x, batch).unflatten(-1, (3, -1, self.head_dim)).unbind(1)  # each [T, H, D]
        if angles is None:
            kv_store(key, value, *cache, batch.slots)
        else:
            query = rope_and_store(query, key, value, *angles, *cache, batch.slots)
        slopes = None if self.slopes is None else self.heads.slice_queries(self.slopes.on(query.device))
        attended = attend(query, cache, batch, self.head_dim**-0.5, alibi_slopes=slopes)
        return self.o_proj(attended, batch)


class NormHead(Module):
    """A head whose rows have length 1 (Baichuan 2, arXiv 2309.10305). Checkpoints hold the unnormalised weight."""

    output_axis = 0

    def __init__(self, c: BaichuanConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self._normalised: Tensor | None = None
        """A view of the weight that was normalised. It keeps its memory, so a weight at another address is a new one."""

    def unit_rows(self) -> Tensor:
        """Return the weight [V, E], normalised in place on the first call after each loading, without a second copy."""
        if not is_compiling() and (self._normalised is None or self._normalised.data_ptr() != self.weight.data_ptr()):
            self._normalised = self.weight.detach()
            functional.normalize(self._normalised, dim=1, out=self._normalised)
        return self.weight

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        return linear(x, self.unit_rows())


class Baichuan(PreNormLM):
    layout = ModelLayout(
        scale_fold_targets={"down_proj": "up_proj"},
        units={"W_pack": (Unit.QUERY_HEAD, Unit.KEY_VALUE_HEAD, Unit.KEY_VALUE_HEAD)},
    )

    def __init__(self, c: BaichuanConfig) -> None:
        rotary = None if c.alibi else RotaryEmbedding(RotaryConfig(c.head_dim, c.max_length))
        slopes = Constant(alibi_slopes(c.num_attention_heads)) if c.alibi else None
        layers = (
            DecoderLayer(c, Attention(c, slopes), MLP(c.hidden_size, c.intermediate_size))
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers, rotary)
        if c.normalised_head:
            self.lm_head = NormHead(c)
