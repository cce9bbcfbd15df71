"""Embeddings."""

from torch import nn

from models.layers.module import Module


class Embedding(nn.Embedding, Module):
    def reset_parameters(self) -> None:
        """Nothing: a checkpoint gives the values. On the meta device torch's own imports its compiler, which takes a second."""
