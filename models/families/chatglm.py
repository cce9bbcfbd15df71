"""ChatGLM-6B: a prefix language model with two positions per token (GLM, arXiv 2103.10360).

T tokens of S sequences, H heads, D channels per head, E hidden channels, V vocabulary, R output rows.
A prompt is a text with [gMASK] or [MASK], then <sop>, then optionally the beginning of the reply. All tokens attend to
the tokens before <sop>, so a prompt is computed in one step. Module names match the checkpoint's tensor names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.gelu import gelu_tanh
from kernels.kv_store import kv_store
from kernels.rope import rope
from models.batch import Batch, LayerCache
from models.capabilities import ModelCapabilities
from models.causal_lm import CausalLM, ModelShape
from models.config import ConfigReader
from models.layers.attention import Heads, attend
from models.layers.constant import Constant
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layout import ModelLayout, Unit

# The original code scales residuals by sqrt(2 * 28), regardless of num_layers.
RESIDUAL_SCALE = math.sqrt(2 * 28)


@dataclass(frozen=True)
class ChatGLMConfig(ModelShape):
    hidden_size: int
    inner_hidden_size: int
    num_attention_heads: int
    head_dim: int
    layernorm_epsilon: float
    max_sequence_length: int
    sop_token_id: int
    mask_token_id: int
    gmask_token_id: int

    @property
    def context_length(self) -> int:
        return self.max_sequence_length

    @property
    def capabilities(self) -> ModelCapabilities:
        return ModelCapabilities(needs_whole_prompt=True)


def read_config(config: ConfigReader) -> ChatGLMConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.expect("position_encoding_2d", (True,), True)
    config.expect("tie_word_embeddings", (False,), False)
    config.expect("pre_seq_len", (None,), None)
    config.expect("quantization_bit", (None, 0), None)
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if hidden_size % (4 * heads):
        raise UserError(
            f"config.json: hidden_size={hidden_size} is not a multiple of 4 * num_attention_heads={4 * heads}, "
            "but rotary embedding turns pairs in both halves of a head"
        )
    return ChatGLMConfig(
        vocab_size=config.count("vocab_size"),
        tie_word_embeddings=False,
        hidden_size=hidden_size,
        inner_hidden_size=config.count("inner_hidden_size"),
        num_hidden_layers=config.num_layers("num_layers"),
        num_attention_heads=heads,
        head_dim=hidden_size // heads,
        layernorm_epsilon=config.positive("layernorm_epsilon", 1e-5),
        max_sequence_length=config.count("max_sequence_length", 2048),
        sop_token_id=config.require("bos_token_id", int),
        mask_token_id=config.require("mask_token_id", int),
        gmask_token_id=config.require("gmask_token_id", int),
    )


class StepInputs(NamedTuple):
    """The tensors of a step that all layers share."""

    place: tuple[Tensor, Tensor]
    """cos and sin of each token's place, [T, D/4] each."""
    block: tuple[Tensor, Tensor]
    """The same of its block position."""
    prefix_lengths: Tensor
    """[S] the cache indices that all tokens attend to: the soft prefix and the text."""


def positions_2d(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return each token's place in the text and its block position, [T] each.

    After the text, the place is the position of the mask, and block positions count from 1. In the text, the block
    position is 0.
    """
    text_length, mask_position = batch.prompt_features[batch.owners].unbind(1)
    place = torch.where(batch.positions < text_length, batch.positions, mask_position)
    return place, (batch.positions - text_length + 1).clamp(min=0)


class RotaryEmbedding2D:
    """Computes the angles of a position. It is not a module: it has no weights, and its table stays float32."""

    def __init__(self, c: ChatGLMConfig) -> None:
        size = c.head_dim // 2
        exact = 1.0 / (10000 ** (torch.arange(0, size, 2, device="cpu").float() / size))  # [D/4]
        self._frequencies = Constant(exact.half().float())  # rounded as in the original code, in any dtype

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, D/4] of positions [T]."""
        angles = positions[:, None].float() * self._frequencies.on(positions.device)  # [T, D/4]
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Attention(Module):
    def __init__(self, c: ChatGLMConfig, layer: int) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_attention_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        # Scores grow with the layer number. As in the original code, they are divided while they may be float16, and
        # scaled up later.
        self.coefficient = layer + 1.0
        self.query_key_value = Linear(c.hidden_size, 3 * c.hidden_size)
        self.dense = Linear(c.hidden_size, c.hidden_size)

    def forward(self, x: Tensor, inputs: StepInputs, batch: Batch, cache: LayerCache) -> Tensor:
        heads = self.query_key_value(x, batch).unflatten(-1, (-1, 3 * self.head_dim))  # [T, H, 3D]
        query, key, value = heads.chunk(3, dim=-1)  # [T, H, D] each
        query, key = self._rope(query, inputs), self._rope(key, inputs)
        query = query / (math.sqrt(self.head_dim) * self.coefficient)
        kv_store(key, value, *cache, batch.slots)
        attended = attend(query, cache, batch, self.coefficient, prefix_lengths=inputs.prefix_lengths)
        return self.dense(attended, batch)

    def _rope(self, x: Tensor, inputs: StepInputs) -> Tensor:
        """Rotate the first half of every head by the place, and the second half by the block position."""
        first, second = x.chunk(2, dim=-1)  # [T, H, D/2]
        return torch.cat((rope(first, *inputs.place), rope(second, *inputs.block)), dim=-1)


class MLP(Module):
    def __init__(self, c: ChatGLMConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = Linear(c.hidden_size, c.inner_hidden_size)
        self.dense_4h_to_h = Linear(c.inner_hidden_size, c.hidden_size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.dense_4h_to_h(gelu_tanh(self.dense_h_to_4h(x, batch)), batch)


class GLMBlock(Module):
    def __init__(self, c: ChatGLMConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(c.hidden_size, c.layernorm_epsilon)
        self.attention = Attention(c, layer)
        self.post_attention_layernorm = LayerNorm(c.hidden_size, c.layernorm_epsilon)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, inputs: StepInputs, batch: Batch, cache: LayerCache) -> Tensor:
        x = self.input_layernorm(x)  # the residual stream continues from the normed state
        x = batch.attending(x) * RESIDUAL_SCALE + self.attention(x, inputs, batch, cache)
        x = self.post_attention_layernorm(x)
        return x * RESIDUAL_SCALE + self.mlp(x, batch)


class Transformer(Module):
    def __init__(self, c: ChatGLMConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(GLMBlock(c, i) for i in range(c.num_hidden_layers))
        self.final_layernorm = LayerNorm(c.hidden_size, c.layernorm_epsilon)


class ChatGLM(CausalLM):
    config: ChatGLMConfig
    layout = ModelLayout(
        embedding="transformer.word_embeddings",
        layers="transformer.layers",
        final_norm="transformer.final_layernorm",
        attention="attention",
        scale_fold_targets={},
        row_parallel=("dense", "dense_4h_to_h"),
        units={"query_key_value": (Unit.QKV_HEAD,)},
    )

    def __init__(self, c: ChatGLMConfig) -> None:
        super().__init__(c)
        self.transformer = Transformer(c)
        self.lm_head = Linear(c.hidden_size, c.vocab_size, bias=False)
        self.rotary = RotaryEmbedding2D(c)

    @property
    def prompt_marks(self) -> Sequence[Sequence[int]]:
        """The end of the text, <sop>; then its [gMASK], or [MASK] if there is none."""
        c = self.config
        return (c.sop_token_id,), (c.gmask_token_id, c.mask_token_id)

    @property
    def of_a_missing_mark(self) -> str:
        c = self.config
        return (
            f"the prompt lacks <sop> (id {c.sop_token_id}), or [gMASK] and [MASK] (ids {c.gmask_token_id} and {c.mask_token_id}): "
            "ChatGLM-6B needs its prompts to be text, [gMASK], <sop>"
        )

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[StepInputs]:
        place, block = (self.rotary.angles(positions, dtype) for positions in positions_2d(batch))
        return (StepInputs(place, block, batch.origins + batch.prompt_features[:, 0]),)
