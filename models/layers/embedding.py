"""Embeddings."""

from torch import nn


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: a checkpoint gives the values. On the meta device torch's own imports its compiler, which takes a second."""
