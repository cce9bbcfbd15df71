"""Embeddings."""

from torch import Tensor, nn

from models.layers.module import Module
from models.layers.tensor_parallel import VocabParallel


class Embedding(nn.Embedding, Module):
    words: VocabParallel | None = None
    """Whose words are whose, where each rank has the vectors of some."""

    def reset_parameters(self) -> None:
        """Nothing: a checkpoint gives the values. On the meta device torch's own imports its compiler, which takes a second."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the vectors [T, E] of tokens, int64 [T]."""
        return super().forward(token_ids) if self.words is None else self.words.embedded(token_ids, self.weight)
