"""Runs a model on batches over its cache."""

import torch

from models.batch import Batch, KVCache
from models.registry import CausalLM


class Runner:
    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's logit rows, in the model's dtype."""
        return self._model(batch, self._cache)
