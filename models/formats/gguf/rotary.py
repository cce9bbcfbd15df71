"""Read the rotary settings of a GGUF file as config.json keys."""

import math
from itertools import product
from typing import Any

import numpy as np
import torch

from conf.errors import UserError
from models.formats.gguf.header import GGUFHeader, GGUFMetadata, TensorInfo
from models.formats.gguf.names import LONG_FACTORS, ROTARY_FACTORS, SHORT_FACTORS
from models.formats.gguf.tensors import read_tensor
from models.layers.rotary import RotaryConfig, llama3_factors

# Tried in order until one gives the file's factors: Llama 3 blends frequencies, Llama 4 does not.
LLAMA3_HIGH_FACTORS = 4.0, 1.0
LLAMA3_ORIGINAL_LENGTHS = [2**i for i in range(4, 25)]


def rotary_channels(file: GGUFMetadata, head_dim: int) -> int:
    """Return the number of rotary channels in a head."""
    return file.read.count("rope.dimension_count", head_dim)


def partial_rotary_factor(channels: int, head_dim: int) -> float:
    """Return partial_rotary_factor.

    It is adjusted so that readers of config.json, which round down, get `channels` again.
    """
    share = channels / head_dim
    return share if int(head_dim * share) == channels else math.nextafter(share, 2)


def longrope(file: GGUFMetadata) -> dict[str, Any] | None:
    """Return rope_scaling of Phi-3, or None. Raises UserError for an attention factor without frequency factors."""
    attention_factor = file.read.positive("rope.scaling.attn_factor", 1.0)
    factor_tensors = [file.tensors.get(name) for name in (SHORT_FACTORS, LONG_FACTORS)]
    if factor_tensors == [None, None]:
        file.read.expect("rope.scaling.attn_factor", (None, 1.0), None)
        file.read.expect("rope.scaling.type", ("none", None), None)
        return None
    short, long = (None if tensor is None else read_tensor(tensor).flatten().tolist() for tensor in factor_tensors)
    factors = {"short_factor": short, "long_factor": long}
    return {"rope_type": "longrope", **factors, "attention_factor": attention_factor}


def rope_scaling(file: GGUFMetadata, rotary_dim: int) -> dict[str, Any] | None:
    """Return rope_scaling, or None. `rotary_dim`: rotary channels in a head.

    Raises UserError for a scaling other than linear, yarn and Llama 3's.
    """
    read = file.read
    kind = read.expect("rope.scaling.type", ("none", "linear", "yarn"), "none")
    for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        read.expect(f"rope.scaling.{key}", (None, 1.0), None)
    if factors := file.tensors.get(ROTARY_FACTORS):
        read.expect("rope.scaling.type", ("none",), "none")
        return _llama3_scaling(file.header, factors, read.positive("rope.freq_base", 10000.0), rotary_dim)
    if kind == "none":
        read.expect("rope.scaling.factor", (None, 0.0, 1.0), None)
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": read.positive("rope.scaling.factor")}
    names = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    return scaling | {
        hf_key: read.raw(key) for hf_key, key in names.items() if kind == "yarn" and read.raw(key) is not None
    }


def _llama3_scaling(header: GGUFHeader, tensor: TensorInfo, theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """Return the Llama 3.1 scaling parameters that give the file's factors [D / 2], the divisors of the frequencies.

    Raises UserError if no parameters do.
    """
    if tensor.shape != (rotary_dim // 2,):
        raise UserError(
            f"{tensor.path}: {ROTARY_FACTORS} has the shape {list(tensor.shape)}, expected {[rotary_dim // 2]}"
        )
    factors = read_tensor(tensor).float()
    factor = float(str(np.float32(factors.max().item())))
    if bool((factors == 1).all()):
        return None
    for high, original in product(LLAMA3_HIGH_FACTORS, LLAMA3_ORIGINAL_LENGTHS):
        # A common factor of the length and of both frequency factors has no effect, so one low factor is enough.
        candidate = RotaryConfig(rotary_dim, original, theta, "llama3", factor, original, 1.0, high)
        # Not bit-exact: the file's factors are float32 differences of close numbers.
        if torch.allclose(factors, llama3_factors(candidate), rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": candidate.low_freq_factor,
                "high_freq_factor": candidate.high_freq_factor,
                "original_max_position_embeddings": original,
            }
    problem = f"{ROTARY_FACTORS} holds factors that Llama 3's scaling does not give, which is not supported"
    raise header.unsupported(problem)
