"""The token embedding."""

from torch import Tensor, nn

from models.layers.module import Module
from models.layers.tensor_parallel import VocabParallel


class Embedding(nn.Embedding, Module):
    words: VocabParallel | None = None
    """The ranks' parts of the vocabulary. None: the embedding is not sharded."""

    def reset_parameters(self) -> None:
        """Do nothing: the checkpoint provides the values.

        On the meta device, torch's own initialisation imports its compiler, which takes a second.
        """

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the vectors [T, E] of tokens, int64 [T]."""
        return super().forward(token_ids) if self.words is None else self.words.embed(token_ids, self.weight)
