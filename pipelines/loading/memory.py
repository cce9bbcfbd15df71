"""Estimates of a run's GPU memory, computed before anything is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.linear_layers import linear_specs
from models.weights import module_bytes


def weight_bytes(model: CausalLM, dtype: torch.dtype) -> int:
    """Return the bytes of a model on the meta device once its weights are loaded in `dtype`."""
    return sum(module_bytes(model, dtype).values())


def max_layer_values(model: CausalLM) -> int:
    """Estimate the largest number of values per token that are live around a linear layer: input, output and a gate.

    The layers must still be float layers. The head is not included: it has only one row per sequence.
    """
    layers = [layer for name, layer in linear_specs(model).items() if model.get_submodule(name) is not model.head]
    return max((sum(layer.shape) + max(layer.shape) for layer in layers), default=0)


def step_bytes(max_values: int, vocab_size: int, dtype: torch.dtype, num_tokens: int, num_sequences: int) -> int:
    """Return approximately the bytes of the tensors that are live in a step.

    These are `max_values` for each token, and the logits of each sequence in `dtype` and in float32.
    """
    return num_tokens * max_values * dtype.itemsize + num_sequences * vocab_size * (dtype.itemsize + 4)


def check_memory(weights: int, step: int, free: int, memory_fraction: float) -> None:
    """Raise UserError if the bytes of weights and of a step exceed the memory that is free for this process."""
    if weights + step > free:
        raise UserError(
            f"the GPU has {_gb(free)} free within device.memory_fraction={memory_fraction}, but the weights need {_gb(weights)} and a step "
            f"{_gb(step)}: give quant=int8 or int4, less device.max_batched_tokens, a larger fraction, or end what else uses the GPU"
        )


@contextmanager
def explained_out_of_memory() -> Iterator[None]:
    """Turn torch's out-of-memory error into a UserError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch_message = " ".join(str(error).split()).split(" If reserved")[0].removeprefix("CUDA out of memory. ")
        raise UserError(
            f"the GPU's memory is full ({torch_message[:200]}): give less device.kv_cache_memory, device.max_batched_tokens or batch_size, "
            "quant=int8 or int4, or end what else uses the GPU"
        ) from error


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
