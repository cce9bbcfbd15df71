"""Qwen 1.8B to 72B of 2023 (arXiv 2309.16609). The rotary base grows with the prompt, and late queries are scaled.

T tokens, H heads, D channels per head, E hidden channels, V vocabulary, R output rows, P thresholds of the prompt
length.
Module names match the checkpoint's tensor names. The order of operations follows the model's own modeling_qwen.py.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import DecoderLayer, PreNormLM, PreNormShape
from models.layers.attention import Heads, attend
from models.layers.constant import Constant
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.rotary import Angles
from models.layout import ModelLayout, Unit


@dataclass(frozen=True)
class QwenConfig(PreNormShape):
    intermediate_size: int
    num_attention_heads: int
    head_dim: int
    rotary_emb_base: float
    max_position_embeddings: int
    seq_length: int
    """The training context length. Both scalings start above it."""
    use_dynamic_ntk: bool
    use_logn_attn: bool

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings

    @property
    def capabilities(self) -> ModelCapabilities:
        """`prefix_stops_scaling`: modeling_qwen.py chooses the rotary base for an empty cache, and then keeps it."""
        depends = self.use_dynamic_ntk and self.max_position_embeddings > self.seq_length
        return ModelCapabilities(keys_depend_on_length=depends, prefix_stops_scaling=True)


def read_config(config: ConfigReader) -> QwenConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    for key, value in (("no_bias", True), ("scale_attn_weights", True), ("rotary_pct", 1.0)):
        config.expect(key, (value,), value)
    for key in ("tie_word_embeddings", "use_cache_quantization"):
        config.expect(key, (False,), False)
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    intermediate_size = config.count("intermediate_size")
    if hidden_size % (2 * heads):
        raise UserError(
            f"config.json: hidden_size={hidden_size} is not a multiple of twice num_attention_heads={heads}"
        )
    if intermediate_size % 2:
        raise UserError(f"config.json: intermediate_size={intermediate_size} is odd, but each half has a matrix")
    head_dim = hidden_size // heads
    if head_dim == 2:
        raise UserError(
            f"config.json: hidden_size={hidden_size} gives each of {heads} heads 2 channels: at least 4 are needed"
        )
    config.expect("kv_channels", (head_dim,), head_dim)
    use_dynamic_ntk, use_logn_attn = (config.require(key, bool) for key in ("use_dynamic_ntk", "use_logn_attn"))
    seq_length = config.count("seq_length")
    if use_logn_attn and seq_length == 1:
        raise UserError("config.json: use_logn_attn needs a seq_length above 1")
    return QwenConfig(
        vocab_size=config.count("vocab_size"),
        num_hidden_layers=config.num_layers(),
        tie_word_embeddings=False,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        rms_norm_eps=config.positive("layer_norm_epsilon"),
        rotary_emb_base=config.positive("rotary_emb_base"),
        max_position_embeddings=config.count("max_position_embeddings"),
        seq_length=seq_length,
        use_dynamic_ntk=use_dynamic_ntk,
        use_logn_attn=use_logn_attn,
    )


LONGEST_PROMPT = 2**31  # an upper bound of the tables, independent of the config


class StepInputs(NamedTuple):
    """The tensors of a step that all layers share."""

    angles: Angles
    query_scales: Tensor | None
    """[T, 1, 1] in the model's dtype. None: queries are not scaled."""


class Rotary:
    """Computes cos and sin of each token's angles.

    The base depends on the prompt's length, and does not change afterwards.
    """

    def __init__(self, c: QwenConfig) -> None:
        longest = min(c.context_length, LONGEST_PROMPT) if c.use_dynamic_ntk else 0
        lengths = list(itertools.takewhile(lambda n: n < longest, (c.seq_length * 2**i for i in itertools.count())))
        # The prompt lengths [P] above which the base changes.
        self._lengths = Constant(torch.tensor(lengths, dtype=torch.int64, device="cpu"))
        self._frequencies = Constant(torch.stack([_frequencies(c, i) for i in range(len(lengths) + 1)]))  # [P + 1, D/2]

    def angles(self, positions: Tensor, prompt_lengths: Tensor, dtype: torch.dtype) -> Angles:
        """Return cos and sin [T, D/2] in `dtype`. positions, prompt_lengths: [T] int64."""
        rows = torch.bucketize(prompt_lengths, self._lengths.on(positions.device))  # [T]
        angles = positions[:, None].float() * self._frequencies.on(positions.device)[rows]  # [T, D/2]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _frequencies(c: QwenConfig, step: int) -> Tensor:
    """Return the frequencies [D/2] for prompt lengths up to seq_length * 2**step.

    The base grows by alpha: 1 up to seq_length, 3 up to twice seq_length, 7 up to four times.
    """
    alpha = 2 ** (step + 1) - 1
    base = c.rotary_emb_base * alpha ** (c.head_dim / (c.head_dim - 2))
    exponents = torch.arange(0, c.head_dim, 2, device="cpu").float() / c.head_dim
    return 1.0 / torch.pow(base, exponents)


def logn_scales(places: Tensor, seq_length: int) -> Tensor:
    """Return log(place + 1) to the base of seq_length, at least 1: float32 [T].

    `places` [T] int64 are the tokens' cache indices, in which a soft prefix counts, as in modeling_qwen.py. The
    logarithm is in float64, so that the result does not depend on the number of tokens.
    """
    return ((places + 1).double().log() / math.log(seq_length)).clamp(min=1).float()


class Attention(Module):
    def __init__(self, c: QwenConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_attention_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.c_attn = Linear(c.hidden_size, 3 * c.hidden_size, bias=True)
        self.c_proj = Linear(c.hidden_size, c.hidden_size, bias=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return [self.c_attn]

    def forward(self, x: Activations, inputs: StepInputs, batch: Batch, cache: LayerCache) -> Tensor:
        query, key, value = self.c_attn(x, batch).unflatten(-1, (3, -1, self.head_dim)).unbind(1)  # each [T, H, D]
        query = rope_and_store(query, key, value, *inputs.angles, *cache, batch.slots)
        if inputs.query_scales is not None:
            query = query * inputs.query_scales
        return self.c_proj(attend(query, cache, batch, self.head_dim**-0.5), batch)


class QwenMLP(MLP):
    names = ("w2", "w1", "c_proj")


class Block(DecoderLayer):
    names = ("ln_1", "attn", "ln_2", "mlp")

    def __init__(self, c: QwenConfig) -> None:
        super().__init__(c, Attention(c), QwenMLP(c.hidden_size, c.intermediate_size // 2))


class Qwen(PreNormLM):
    config: QwenConfig
    layout = ModelLayout(
        embedding="transformer.wte",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attention="attn",
        norms=("ln_1", "ln_2"),
        scale_fold_targets={"c_proj": "w1"},
        row_parallel=("c_proj",),
        units={"c_attn": (Unit.QUERY_HEAD, Unit.KEY_VALUE_HEAD, Unit.KEY_VALUE_HEAD)},
    )

    def __init__(self, c: QwenConfig) -> None:
        super().__init__(c, (Block(c) for _ in range(c.num_hidden_layers)), Rotary(c))

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Any]:
        (angles,) = super().layer_inputs(batch, dtype)
        assert angles is not None
        if not self.config.use_logn_attn:
            return (StepInputs(angles, None),)
        places = batch.positions + batch.origins[batch.owners]
        return (StepInputs(angles, logn_scales(places, self.config.seq_length).to(dtype)[:, None, None]),)
