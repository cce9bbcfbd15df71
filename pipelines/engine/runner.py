"""Runs a model on batches over its cache."""

import torch

from models.batch import Batch, KVCache
from models.registry import CausalLM


class Runner:
    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self._model.step_weight_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return sum(layer[0, 0].nbytes for layer in [*self._cache.keys, *self._cache.values])

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's logit rows, in the model's dtype."""
        return self._model(batch, self._cache)
