"""The token embedding."""

import torch
from torch import Tensor, nn

from models.layers.dense import DenseMethod, StoredFloats
from models.layers.matrix_layer import MatrixLayer
from models.layers.tensor_parallel import VocabParallel
from models.sharding import Shard, count


class Embedding(MatrixLayer):
    """Vectors [V, E] of tokens. A tied head multiplies by the same matrix."""

    words: VocabParallel | None = None
    """The ranks' parts of the vocabulary. None: the embedding is not sharded."""
    is_quantizable = is_packable = False  # if untied; a tied head decides for both

    def __init__(self, vocab_size: int, channels: int) -> None:
        super().__init__()
        self.shape = vocab_size, channels
        self.method = DenseMethod(StoredFloats(self.shape), parameter=nn.Parameter(torch.empty(self.shape)))
        self._dtype = torch.get_default_dtype()

    @property
    def embedding_dim(self) -> int:
        """The channels E of a vector."""
        return self.shape[1]

    def load(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        super().load(tensors, dtype, device)
        self._dtype = dtype

    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().restore(tensors, dtype)
        self._dtype = dtype

    def shard(self, vocabulary: tuple[range, ...]) -> dict[str, Shard]:
        """Keep a rank's tokens, before loading. Return the shards of the checkpoint's tensors by their names here."""
        self.method, shards = self.method.shard(vocabulary)
        self.shape = count(vocabulary), self.shape[1]
        return shards

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the vectors [T, E] of tokens, int64 [T]."""
        if self.words is None:
            return self._rows(token_ids)
        return self.words.embed(token_ids, self._rows)

    def _rows(self, token_ids: Tensor) -> Tensor:
        return self.method.rows(token_ids, self._dtype)
