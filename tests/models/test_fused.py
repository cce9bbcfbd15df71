"""Fused products, and norms that add: a model's logits equal, bit for bit, the logits of separate layers with torch's
sums."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.quantization import Activations, QuantConfig, QuantScheme
from conf.schema import DType
from kernels.rms_norm import rms_norm
from models.layers import norm
from models.layers.linear import MergedLinear
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import all_logits, run_config, write_llama
from tests.helpers.cases import each

PROMPT = [7, 3, 90, 20, 33, 41, 8, 5, 17, 60, 2]
SCHEMES = {
    "floats": QuantConfig(),
    "int8": QuantConfig(QuantScheme.int8),
    "int8 but one layer": QuantConfig(QuantScheme.int8, overrides={"*.k_proj": "none", "*.0.mlp.up_proj": "int4"}),
    "int4": QuantConfig(QuantScheme.int4, symmetric=False, group_size=32),
    "a8w8": QuantConfig(QuantScheme.a8w8, activations=Activations.dynamic),
}


def added_by_torch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float | None
) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm(total, weight, eps, weight_offset), total


@each("scheme", SCHEMES)
@each("dtype", [DType.float32, DType.bfloat16])
@each("biases", [False, True])
def test_logits_of_fused_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, dtype: DType, biases: bool
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1}
    write_llama(tmp_path, **sizes, attention_bias=biases, mlp_bias=biases)
    run = run_config(tmp_path)
    run = replace(run, model=replace(run.model, dtype=dtype), quant=SCHEMES[scheme])
    fused = all_logits(load_engine(run, 1), PROMPT)
    monkeypatch.setattr(MergedLinear, "merge", lambda layers: None)
    monkeypatch.setattr(norm, "add_rms_norm", added_by_torch)
    assert torch.equal(all_logits(load_engine(run, 1), PROMPT), fused)
