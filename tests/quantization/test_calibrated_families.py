"""Every scheme that needs calibration on every family: its files give the model that was made, to the bit, and its error is bounded."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from conf.quantization import QuantConfig
from models.formats.manifest import verify_manifest
from tests.helpers.builders import all_logits
from tests.helpers.goldens import FAMILIES, GOLDENS, WHOLE_PROMPTS
from tests.helpers.quantized_models import (
    CALIBRATED,
    INT8,
    SHIFT,
    STATIC_CACHES,
    make,
    quantize_run,
    random_rows,
    reloaded,
    write_rows,
)

SHIFTABLE = ("bloom", "gpt2", "opt")
# One of each way that weights, activations, folds and groups can go; test_quantize.py has all the others on Llama.
SCHEMES = ("int4 gptq, groups on the way", "int4 awq, auto_clip", "a8w8 static smoothquant", "fp8 static per tensor")
# Bounds are 1.3 to 1.6 times the largest error of any family, as a share of the logits' standard deviation. Random weights have nothing
# that evens errors out, and their activations no outliers; where a router takes another expert, errors are larger.
BOUNDS = {"int4": 0.5, "int8": 0.2, "a8w8": 0.2, "fp8": 0.3}


UNEVEN = (
    "baichuan-",
    "gemma2",
    "llama",
    "mistral",
    "qwen2",
    "qwen2_full",
    "qwen3",
)  # groups of 32 do not divide their down_proj


def in_groups(quant: QuantConfig, family: str) -> QuantConfig:
    """With groups, where the family's layers have any."""
    if family == "baichuan2-13b":  # 80 channels
        return replace(quant, group_size=-1, overrides={})
    return quant if family.startswith(UNEVEN) and family != "qwen2_moe" else replace(quant, overrides={})


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"chatglm_28layers", "chatglm_bin"}))  # chatglm in other files
def test_files_hold_the_model_that_was_made(family: str, tmp_path: Path) -> None:
    golden = load_file(GOLDENS / family / "golden.safetensors")
    prompt, expected = golden["input_ids"][0].tolist(), golden["logits"][0]
    data = write_rows(tmp_path / "rows.jsonl", random_rows(18, 16, prompt[-2:] if family in WHOLE_PROMPTS else ()))
    schemes = {name: in_groups(CALIBRATED[name], family) for name in SCHEMES}
    schemes |= {"a8w8 shift": SHIFT} if family in SHIFTABLE else {}
    schemes |= {f"int8, cache of {name}": QuantConfig(INT8, **cache) for name, cache in STATIC_CACHES.items()}
    errors = {}
    for i, (name, quant) in enumerate(schemes.items()):
        target = tmp_path / str(i)
        made = make(quantize_run(GOLDENS / family, quant, target, data, sequence_length=18), tmp_path / "run")
        verify_manifest(target)
        logits = all_logits(made, prompt)
        assert all_logits(reloaded(target), prompt).equal(logits), name
        errors[name] = float((logits - expected).square().mean().sqrt() / expected.std())
    assert all(0 < error < BOUNDS[name.split()[0].rstrip(",")] for name, error in errors.items()), errors
