"""nanochat (Karpathy): norms without weights, also after the embedding, squared ReLU, and rotation by negative angles.

T tokens, D channels per head.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kernels.kv_store import rope_and_store
from kernels.rms_norm import rms_norm
from models import decoder
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.families.gemma2 import CappedHead, read_soft_cap
from models.layers.constant import Constant
from models.layers.mlp import UngatedMLP, squared_relu
from models.layers.norm import ResidualStream
from models.layers.rotary import Angles
from models.layout import ModelLayout


@dataclass(frozen=True)
class NanochatConfig(DecoderConfig):
    norms_have_weights: ClassVar[bool] = False
    attention_bias: bool
    final_logit_softcapping: float | None


def read_config(config: ConfigReader) -> NanochatConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    shape = read_decoder_config(config, 1e-6, 2048, activations=("relu2",))
    return NanochatConfig(
        **vars(shape) | {"rotary": replace(shape.rotary, attention_factor=1.0)},  # the norms undo yarn's factor
        attention_bias=config.get("attention_bias", bool, False),
        final_logit_softcapping=read_soft_cap(config, "final_logit_softcapping", 15.0),
    )


class Attention(decoder.Attention):
    """Attention with norms of queries and keys. The checkpoint's order of rotation and norm has the same result."""

    def __init__(self, c: NanochatConfig) -> None:
        super().__init__(c, None, c.attention_bias, c.attention_bias)
        self._ones, self._eps = Constant(torch.ones(c.head_dim, device="cpu")), c.rms_norm_eps

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        ones = self._ones.on(query.device).to(query.dtype)
        return rope_and_store(query, key, value, *angles, *cache, batch.slots, False, ones, ones, self._eps)


class MLP(UngatedMLP):
    names = ("fc1", "fc2")


class Nanochat(DecoderLM):
    config: NanochatConfig
    layout = ModelLayout(norms=(), scale_fold_targets={"o_proj": "v_proj"}, row_parallel=("o_proj", "fc2"))

    def __init__(self, c: NanochatConfig) -> None:
        layers = (
            DecoderLayer(c, Attention(c), MLP(c.hidden_size, c.intermediate_size, False, squared_relu))
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers)
        self.lm_head = CappedHead(self.embedding, c.tie_word_embeddings, c.final_logit_softcapping)  # type: ignore[arg-type]
        self._ones = Constant(torch.ones(c.hidden_size, device="cpu"))

    def embed(self, batch: Batch) -> ResidualStream:
        embedded: Tensor = self.embedding(batch.token_ids)
        ones = self._ones.on(embedded.device).to(embedded.dtype)
        return ResidualStream(rms_norm(embedded, ones, self.config.rms_norm_eps))

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Angles | None]:
        (angles,) = super().layer_inputs(batch, dtype)
        assert angles is not None
        return ((angles[0], -angles[1]),)
