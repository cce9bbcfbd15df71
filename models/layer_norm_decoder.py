"""Decoders with LayerNorms. `layout` defines their module names.

T tokens, R output rows, E hidden channels.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM
from models.decoder import DecoderConfig, PreNormShape, Rotary
from models.layers.embedding import Embedding
from models.layers.linear import make_head
from models.layers.named_parts import NamedParts, register
from models.layers.norm import LayerNorm
from models.layers.rotary import Angles, RotaryEmbedding


class SequentialLayer(NamedParts):
    """y = x + attention(norm(x)), then y + mlp(norm(y)).

    The parts are called as `decoder.Attention` and `mlp.MLP` are, and have `readers`.
    """

    names: tuple[str, ...] = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

    def __init__(self, norms: tuple[LayerNorm, LayerNorm], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(norms[0], attention, norms[1], mlp)

    def forward(self, x: Tensor, inputs: Any, batch: Batch, cache: LayerCache) -> Tensor:
        """inputs: the model's `layer_inputs`, of which there is one, such as angles."""
        attention_norm, attention, mlp_norm, mlp = self.parts
        x = batch.attending(x) + attention(attention_norm(x, attention.readers), inputs, batch, cache)
        update: Tensor = mlp(mlp_norm(x, mlp.readers), batch)
        return x + update


class ParallelLayer(NamedParts):
    """y = x + attention(norm(x)) + mlp(norm(x)). The parts are called as `decoder.Attention` and `mlp.MLP` are."""

    names: tuple[str, ...] = ("input_layernorm", "self_attn", "mlp")

    def __init__(self, norm: LayerNorm, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(norm, attention, mlp)

    def forward(self, x: Tensor, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        norm, attention, mlp = self.parts
        normed = norm(x)  # floats: in the last layer, attention and feed-forward read different rows
        x = batch.attending(x) + attention(normed, angles, batch, cache)
        update: Tensor = mlp(batch.attending(normed), batch)
        return x + update


class LayerNormLM(CausalLM):
    """A model of such layers. A subclass defines the layers' inputs."""

    config: PreNormShape

    def __init__(
        self,
        c: PreNormShape,
        layers: Iterable[nn.Module],
        norm: LayerNorm,
        position_embeddings: Mapping[str, nn.Module] | None = None,
        head_bias: bool = False,
    ) -> None:
        """`norm`: after the last layer. `position_embeddings`: modules between embedding and layers, by name."""
        super().__init__(c)
        embedding = Embedding(c.vocab_size, c.hidden_size)
        register(self, self.layout.embedding, embedding)
        for name, module in (position_embeddings or {}).items():
            register(self, name, module)
        register(self, self.layout.layers, nn.ModuleList(layers))
        register(self, self.layout.final_norm, norm)
        register(self, self.layout.head, make_head(embedding, c.tie_word_embeddings, head_bias))


class RotaryLayerNormLM(LayerNormLM):
    """A model with rotary attention."""

    def __init__(
        self,
        c: DecoderConfig,
        layers: Iterable[nn.Module],
        norm: LayerNorm,
        head_bias: bool = False,
    ) -> None:
        super().__init__(c, layers, norm, head_bias=head_bias)
        self.rotary: Rotary = RotaryEmbedding(c.rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Angles]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)
