"""`export.format`: the same codes in other tools' layouts, which run as the model that was made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from conf.quantization import ExportConfig, ExportFormat, GptqConfig, QuantConfig
from pipelines.loading import load_engine
from tests.builders import all_logits, run_config
from tests.quantization.making import AWQ, GPTQ, INT4, INT8, make, quantize_run, random_rows, reloaded, write_rows

LLAMA = Path(__file__).resolve().parents[1] / "goldens" / "llama3"
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
# What groups of 32 do not divide, and the head, which AWQ's files do not quantise.
LAYERS: dict[str, Any] = {"group_size": 32, "skip": ["lm_head", "*.down_proj"]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))


@pytest.mark.parametrize(
    ("format", "quant"),
    [
        (ExportFormat.awq, QuantConfig(INT4, AWQ, **LAYERS)),
        (ExportFormat.awq, QuantConfig(INT4, AWQ, **LAYERS, symmetric=False)),
        (ExportFormat.gptq, QuantConfig(INT4, GPTQ, **LAYERS)),
        (ExportFormat.gptq, QuantConfig(INT4, GPTQ, **LAYERS, symmetric=False)),
        (ExportFormat.gptq, QuantConfig(INT4, GPTQ, **LAYERS, gptq=GptqConfig(static_groups=False))),
    ],
)
def test_it_reloads_to_the_same_bits(format: ExportFormat, quant: QuantConfig, data: Path, tmp_path: Path) -> None:
    run = replace(quantize_run(LLAMA, quant, tmp_path / "made", data), export=ExportConfig(format))
    made = make(run, tmp_path / "run")
    assert all_logits(reloaded(tmp_path / "made"), PROMPT).equal(all_logits(made, PROMPT))
    named = load_engine(replace(run_config(tmp_path / "made"), quant=quant), 3)  # its own option contradicts nothing
    assert all_logits(named, PROMPT).equal(all_logits(made, PROMPT))


@pytest.mark.parametrize(
    ("format", "quant", "message"),
    [
        (ExportFormat.awq, QuantConfig(INT8), "AWQ holds int4 weights, not int8 per channel: write compressed-tensors"),
        (ExportFormat.awq, QuantConfig(INT4), r"AWQ has no quantised head: give quant.skip=\[lm_head\]"),
    ],
)
def test_what_a_layout_cannot_hold(
    format: ExportFormat, quant: QuantConfig, message: str, data: Path, tmp_path: Path
) -> None:
    run = replace(quantize_run(LLAMA, quant, tmp_path / "made", data), export=ExportConfig(format))
    for dry_run in (False, True):
        with pytest.raises(UserError, match=message):
            make(replace(run, quantize=replace(run.quantize, dry_run=dry_run)), tmp_path / "run")
    assert not (tmp_path / "made").exists()
