"""Pruning: set the least important weights to 0, by magnitude or by Wanda (arXiv 2306.11695).

O output channels, I input channels, R rows, C scores in a row.
"""

from decimal import Decimal

import torch
from torch import Tensor

from conf.quantization import SparsityConfig, SparsityMethod, SparsityPattern
from quantization.activations import check_activations

GROUP, ZEROS = 4, 2  # 2:4 sparsity: two zeros in each group of four


def pruned_entries(weight: Tensor, norms: Tensor | None, config: SparsityConfig) -> Tensor:
    """Return the entries of weight [O, I], of any float dtype, that become 0: [O, I] bool.

    norms: the L2 norm of each input channel over calibration tokens, [I] float32; None if no token reached the layer.
    Wanda scores a weight by |weight| * norm, and prunes the same share of each output; without norms the score is the
    magnitude. The magnitude method prunes a share of the whole layer, as the baseline in the Wanda paper. With 2:4 both
    prune two weights of each group of four; four divides I. The number of zeros is ratio * number of scores, rounded
    down. Among equal scores the first are pruned. Raises UserError as check_activations does.
    """
    scores = weight.float().abs()
    by_output = config.method is SparsityMethod.wanda
    if by_output and norms is not None:
        check_activations(1, norms)
        scores *= norms
    if config.pattern is SparsityPattern["2:4"]:
        return _least(scores.reshape(-1, GROUP), ZEROS).reshape(weight.shape)
    rows = scores if by_output else scores.reshape(1, -1)
    # Decimal, because in binary floats 0.29 * 100 is less than 29.
    return _least(rows, int(Decimal(str(config.ratio)) * rows.shape[1])).reshape(weight.shape)


def _least(scores: Tensor, count: int) -> Tensor:
    """Return the mask, [R, C] bool, of the `count` least scores of each row of scores [R, C]."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    # [R, 1]; a sort would take 12 bytes per weight
    threshold = scores.kthvalue(count, 1, keepdim=True).values
    below, equal = scores < threshold, scores == threshold
    num_missing = count - below.sum(1, keepdim=True)
    return below | equal & (equal.cumsum(1, dtype=torch.int32) <= num_missing)
