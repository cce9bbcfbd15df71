"""From logits to token ids on the device that has them, without sorting on a GPU."""

from torch import Tensor

from kernels.sampling import reference

__all__ = ["penalize", "sample"]


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, steps: Tensor
) -> Tensor:
    """See kernels/sampling/reference.py."""
    if logits.is_cuda:
        from kernels.sampling import triton

        return triton.sample(logits, temperature, top_k, top_p, min_p, seeds, steps)
    return reference.sample(logits, temperature, top_k, top_p, min_p, seeds, steps)


def penalize(
    logits: Tensor, counts: Tensor, prompted: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """See kernels/sampling/reference.py."""
    if logits.is_cuda:
        from kernels.sampling import triton

        return triton.penalize(logits, counts, prompted, repetition, presence, frequency)
    return reference.penalize(logits, counts, prompted, repetition, presence, frequency)
