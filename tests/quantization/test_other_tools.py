"""Files of task=quantize in transformers, which reads them with the package compressed-tensors: the same logits."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization.lifecycle import forward
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from conf.quantization import (
    BlockActivations,
    QuantConfig,
    QuantScheme,
    SparsityConfig,
    SparsityMethod,
    SparsityPattern,
)
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import all_logits, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.quantized_models import (
    A8W8,
    AWQ,
    CALIBRATED,
    DYNAMIC,
    FP8,
    GPTQ,
    INT4,
    INT8,
    make,
    quantize_run,
    random_rows,
    write_rows,
)

PROMPT = [1, *range(5, 50)]
SCHEMES = {name: CALIBRATED[name] for name in ("a8w8 static smoothquant", "fp8 static")} | {
    "int4 gptq": QuantConfig(INT4, GPTQ, group_size=32),
    "int4 awq, asymmetric": QuantConfig(INT4, AWQ, group_size=32, symmetric=False),
    "int8": QuantConfig(INT8),
    "a8w8 dynamic": QuantConfig(A8W8, activations=DYNAMIC),
    "fp8 dynamic": QuantConfig(FP8, activations=DYNAMIC),
    "a8w8 static without the head": QuantConfig(A8W8, activations=CALIBRATED["a8w8 static"].activations, skip=["lm_head"]),
    "int4 gptq, pruned": QuantConfig(
        INT4, GPTQ, group_size=32, sparsity=SparsityConfig(SparsityMethod.wanda, pattern=SparsityPattern["2:4"])
    ),
    "fp8 dynamic, pruned": QuantConfig(FP8, activations=DYNAMIC, sparsity=SparsityConfig(SparsityMethod.magnitude, 0.3)),
    "int4 with an int8 layer": QuantConfig(INT4, group_size=32, overrides={"*.down_proj": "int8/32"}),
    "mxfp4": QuantConfig(QuantScheme.mxfp4),
    "nvfp4 with mxfp4 and int8 layers": QuantConfig(QuantScheme.nvfp4, overrides={"*.v_proj": "int8"}),  # down_proj: mxfp4
}  # fmt: skip
# Codes and scales are equal. Unquantised activations are fixed-point numbers in our kernels: measured to cost 1e-4 of
# the largest logit here. Otherwise float32 sums in another order differ by 1e-6. If such a last bit decides between two
# codes of an activation, its step shows in that token and the tokens after it, in less than half of them: 1/127 of it,
# or 1/16 of fp8.
FIXED_POINT, ORDER, STEPS = 3e-4, 1e-5, {"a8w8": 0.03, "fp8": 0.1}


@pytest.mark.long
@each("tied", [False, True])
@each("name", SCHEMES)
def test_transformers_gives_the_same_logits(
    name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "float", intermediate_size=96, tie_word_embeddings=tied)
    data = write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
    run = quantize_run(tmp_path / "float", SCHEMES[name], tmp_path / "made", data)
    ours = all_logits(make(run, tmp_path / "run"), PROMPT)
    if SCHEMES[name].scheme.is_blocks:
        float_activations = QuantConfig(block_activations=BlockActivations.none)
        made = run_config(tmp_path / "made")
        assert ours.equal(all_logits(load_engine(made, 3), PROMPT))
        ours = all_logits(load_engine(replace(made, quant=float_activations), 3), PROMPT)
    config = {}
    if not SCHEMES[name].symmetric:  # transformers 5.23 accepts its zero points only if everything becomes floats
        config = {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
    if name == "a8w8 dynamic":  # its scales are absmax / 127.5; ours, like vLLM's, absmax / 127
        monkeypatch.setattr(forward, "compute_dynamic_scales_and_zp", scales_of_127)
    # else it rounds FP4 weights to bfloat16
    monkeypatch.setattr(nvfp4, "unpack_fp4_from_uint8", partial(unpack_fp4_from_uint8, dtype=torch.float32))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32, **config).eval()
    with torch.no_grad():
        logits = theirs(torch.tensor([PROMPT])).logits[0]
    errors = (logits - ours).abs().amax(1) / ours.abs().max()  # of each token
    scheme = name.split()[0]
    assert errors.median() < (ORDER if scheme in STEPS else FIXED_POINT)
    assert errors.max() < STEPS.get(scheme, FIXED_POINT)


def scales_of_127(value: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    scales = value.abs().amax(-1, keepdim=True) / 127
    return scales, torch.zeros_like(scales, dtype=torch.int8)
