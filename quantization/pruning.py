"""Pruning: weights that matter least become 0, by their magnitudes or by Wanda (arXiv 2306.11695).

O output channels, I input channels, R rows, C scores in a row.
"""

from decimal import Decimal

import torch
from torch import Tensor

from conf.quantization import SparsityConfig, SparsityMethod, SparsityPattern
from quantization.activations import check_activations

GROUP, ZEROS = 4, 2  # of the pattern 2:4


def pruned_entries(weight: Tensor, norms: Tensor | None, config: SparsityConfig) -> Tensor:
    """Return where weight [O, I] of any float dtype becomes 0, [O, I] bool.

    norms: the L2 norm of each input channel over calibration tokens, [I] float32; None where no token reached the layer.
    Wanda scores a weight by |weight| * norm, and prunes the same share of each output; without norms it scores by magnitude. Magnitude
    prunes a share of the whole layer, the baseline of that paper. With 2:4 both prune two of each group of four, whose number divides I.
    The number of zeros is the ratio's, rounded down; of equal scores the first ones go. Raises UserError as check_activations does.
    """
    scores = weight.float().abs()
    by_output = config.method is SparsityMethod.wanda
    if by_output and norms is not None:
        check_activations(1, norms)
        scores *= norms
    if config.pattern is SparsityPattern["2:4"]:
        return _least(scores.reshape(-1, GROUP), ZEROS).reshape(weight.shape)
    rows = scores if by_output else scores.reshape(1, -1)
    # the decimal number that was given: in binary floats 0.29 * 100 is less than 29
    return _least(rows, int(Decimal(str(config.ratio)) * rows.shape[1])).reshape(weight.shape)


def _least(scores: Tensor, count: int) -> Tensor:
    """Return where the `count` least of each row of scores [R, C] are, [R, C] bool."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(count, 1, keepdim=True).values  # [R, 1]; a sort would take 12 bytes for each weight
    below, equal = scores < threshold, scores == threshold
    left = count - below.sum(1, keepdim=True)
    return below | equal & (equal.cumsum(1, dtype=torch.int32) <= left)
