"""Decoders with LayerNorms and rotary attention, otherwise as Llama's. Module names match the checkpoint's tensor names.

T tokens, R output rows, E hidden channels.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM
from models.decoder import Attention, DecoderConfig
from models.layers.embedding import Embedding
from models.layers.linear import make_head
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layers.rotary import Angles, RotaryEmbedding


class SequentialLayer(Module):
    """y = x + attention(norm(x)), then y + mlp(norm(y)). `mlp` is called as `mlp.MLP` is, and has `readers`."""

    def __init__(self, norms: tuple[LayerNorm, LayerNorm], self_attn: Attention, mlp: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = norms[0], self_attn
        self.post_attention_layernorm, self.mlp = norms[1], mlp

    def forward(self, x: Tensor, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        normed = self.input_layernorm(x, self.self_attn.readers)
        x = batch.attending(x) + self.self_attn(normed, angles, batch, cache)
        update: Tensor = self.mlp(self.post_attention_layernorm(x, self.mlp.readers), batch)
        return x + update


class ParallelLayer(Module):
    """y = x + attention(norm(x)) + mlp(norm(x)). `mlp` is called as `mlp.MLP` is."""

    def __init__(self, norm: LayerNorm, self_attn: Attention, mlp: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn, self.mlp = norm, self_attn, mlp

    def forward(self, x: Tensor, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        normed = self.input_layernorm(x)  # floats: in the last layer, attention and feed-forward read different rows
        x = batch.attending(x) + self.self_attn(normed, angles, batch, cache)
        update: Tensor = self.mlp(batch.attending(normed), batch)
        return x + update


class Decoder(Module):
    def __init__(self, c: DecoderConfig, layers: Iterable[nn.Module], norm: LayerNorm) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class LayerNormLM(CausalLM):
    def __init__(self, c: DecoderConfig, layers: Iterable[nn.Module], norm: LayerNorm) -> None:
        """`norm`: after the last layer."""
        super().__init__(c)
        self.model = Decoder(c, layers, norm)
        self.lm_head = make_head(self.model.embed_tokens, c.tie_word_embeddings)
        self.rotary = RotaryEmbedding(c.rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Angles]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)
