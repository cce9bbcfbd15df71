"""Runs a model on batches over its cache."""

import torch

from kernels.copy_blocks import copy_blocks
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM


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
        return sum(tensor[0, 0].nbytes for tensor in self._cache.tensors)

    def mark_prompt(self, token_ids: list[int]) -> tuple[int, ...]:
        return self._model.mark_prompt(token_ids)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks of the cache in all layers, from and to."""
        if copies:
            sources, targets = torch.tensor(copies, device=self._cache.tensors[0].device).T
            for keys, values in self._cache.layers:
                copy_blocks(keys, values, sources, targets)

    def run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [R, E] and logits [R, V] of the batch's output rows, in the model's dtype."""
        hidden = self._model(batch, self._cache)
        return hidden, self._model.logits(hidden)
