"""Similarity of vectors. Without torch, because the server's process also computes it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def cosine_similarities(vectors: Sequence[Sequence[float]], pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Return the cosine similarity of each pair, in float64. A vector of zeros has the similarity 0.

    `pairs`: positions in `vectors`. The order of a pair and the number of vectors change no bit.
    """
    matrix: NDArray[np.float64] = np.asarray(vectors, np.float64)
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    matrix /= np.where(norms > 0, norms, 1.0)
    return [float(matrix[i] @ matrix[j]) for i, j in pairs]
