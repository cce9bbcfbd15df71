"""Files of task=quantize in transformers, which reads them with the package compressed-tensors: the same logits."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization.lifecycle import forward
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from conf.quantization import QuantConfig
from tests.builders import all_logits, write_llama
from tests.quantization.making import (
    A8W8,
    CALIBRATED,
    DYNAMIC,
    FP8,
    INT4,
    INT8,
    make,
    quantize_run,
    random_rows,
    write_rows,
)

PROMPT = [1, *range(5, 50)]
SCHEMES = {name: CALIBRATED[name] for name in ("int4 gptq", "int4 awq", "a8w8 static smoothquant", "fp8 static")} | {
    "int8": QuantConfig(INT8),
    "a8w8 dynamic": QuantConfig(A8W8, activations=DYNAMIC),
    "fp8 dynamic": QuantConfig(FP8, activations=DYNAMIC),
    "a8w8 static without the head": QuantConfig(A8W8, activations=CALIBRATED["a8w8 static"].activations, skip=["lm_head"]),
    "int4 with an int8 layer": QuantConfig(INT4, group_size=8, overrides={"*.down_proj": "int8"}),
}  # fmt: skip
# Codes and scales are equal; float32 sums in another order differ by 1e-6 of the logits. Where such a last bit decides between two codes
# of an activation, a step of 1/127 of it shows, in that token and those after it: in less than half of them, by at most 3 %.
TOLERANCE, STEP = 1e-5, 0.03


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_gives_the_same_logits(
    name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "float", tie_word_embeddings=tied)
    data = write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
    run = quantize_run(tmp_path / "float", SCHEMES[name], tmp_path / "made", data)
    ours = all_logits(make(run, tmp_path / "run"), PROMPT)
    config = {}
    if not SCHEMES[name].symmetric:  # whose zero points transformers 5.23 only takes when everything becomes floats
        config = {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
    if name == "a8w8 dynamic":  # its scales are absmax / 127.5; ours, like vLLM's, absmax / 127
        monkeypatch.setattr(forward, "compute_dynamic_scales_and_zp", scales_of_127)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32, **config).eval()
    with torch.no_grad():
        found = theirs(torch.tensor([PROMPT])).logits[0]
    errors = (found - ours).abs().amax(1) / ours.abs().max()  # of each token
    assert errors.median() < TOLERANCE
    assert errors.max() < (STEP if "a8w8" in name else TOLERANCE)


def scales_of_127(value: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    scales = value.abs().amax(-1, keepdim=True) / 127
    return scales, torch.zeros_like(scales, dtype=torch.int8)
