"""Files of `quantize.format=vllm_cpu` in vLLM on a CPU: the same tokens as ours. Skipped if vLLM is not installed."""

import json
import subprocess
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.quantization import QuantConfig, QuantizedFormat
from kernels.build import instruction_set
from models.tiny.corpus import documents
from models.tokenizers import load_tokenizer
from tests.helpers.builders import REPOSITORY, complete, engine_of
from tests.helpers.quantized_models import (
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
from tests.helpers.vllm_tokens import PYTHON

TINY = REPOSITORY / "models" / "tiny"
NUM_TOKENS = 16
# Sums in another order differ in their last bits. If one decides between two codes of an activation, a nearly equal
# token may win.
NUM_EQUAL = 6
# Without VNNI oneDNN saturates sums of 16 bits in its products of 8 bits (its documentation: "Nuances of int8
# computations"):
# log probabilities of first tokens differ by up to 0.6. Those of fp8, which is computed in float32, differ by less than
# 0.01.
BY_ONEDNN = {"int8", "a8w8 dynamic", "a8w8 static smoothquant"}
NO_HEAD: dict[str, Any] = {"skip": ["lm_head"]}
IN_FLOAT32 = {
    "int8": QuantConfig(INT8),
    "a8w8 dynamic": QuantConfig(A8W8, activations=DYNAMIC, **NO_HEAD),
    "a8w8 static smoothquant": QuantConfig(A8W8, SMOOTHQUANT, activations=STATIC, **NO_HEAD),
    "fp8 dynamic": QuantConfig(FP8, activations=DYNAMIC, **NO_HEAD),
}
# vLLM's int4 product on a CPU has no float32. In bfloat16 log probabilities of a first token differ by up to 0.2 with
# float weights, too.
IN_BFLOAT16 = {
    "int4": QuantConfig(INT4, group_size=32, overrides={"lm_head": "int8"}),
    "int4 asymmetric": QuantConfig(INT4, group_size=32, symmetric=False, **NO_HEAD),
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return the beginnings of eight texts that tiny knows."""
    tokenizer = load_tokenizer(TINY)
    assert tokenizer is not None
    return [tokenizer.encode(text, add_special_tokens=True)[: 20 + i] for i, text in enumerate(islice(documents(7), 8))]


pytestmark = [pytest.mark.long, pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}")]


def in_vllm(
    quants: dict[str, QuantConfig], prompts: list[list[int]], folder: Path, dtype: str
) -> list[tuple[Path, dict[str, Any]]]:
    """Return quantised tiny models, and vLLM's results for each. One process computes all, because its imports take
    longest."""
    data = write_rows(folder / "rows.jsonl", random_rows(20, 16))
    for name, quant in quants.items():
        run = quantize_run(TINY, quant, folder / name, data, format=QuantizedFormat.vllm_cpu)
        make(run, folder / "run" / name)
    command = [
        PYTHON,
        "-P",  # the script's folder contains no vLLM modules
        REPOSITORY / "tests" / "helpers" / "vllm_tokens.py",
        dtype,
        str(NUM_TOKENS),
        *(folder / name for name in quants),
    ]
    done = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [(folder / name, json.loads(line)) for name, line in zip(quants, lines, strict=True)]


def test_it_gives_our_tokens(prompts: list[list[int]], tmp_path: Path) -> None:
    greedy = DecodeConfig(max_new_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    quants = {n: q for n, q in IN_FLOAT32.items() if not (n in BY_ONEDNN and instruction_set() == "avx2")}
    for folder, theirs in in_vllm(quants, prompts, tmp_path, "float32"):
        ours = complete(engine_of(folder, len(prompts)), prompts, greedy)
        equal = [row.token_ids == tokens for row, tokens in zip(ours, theirs["tokens"], strict=True)]
        assert sum(equal) >= NUM_EQUAL, (folder.name, equal)


def test_it_gives_nearly_our_log_probabilities(prompts: list[list[int]], tmp_path: Path) -> None:
    if instruction_set() == "avx2":
        pytest.skip("vLLM's library for AVX2 has no product of 4 bits")
    first = DecodeConfig(max_new_tokens=1, temperature=0, ignore_eos=True, logprobs=20)
    for folder, theirs in in_vllm(IN_BFLOAT16, prompts, tmp_path, "bfloat16"):
        for row, expected in zip(complete(engine_of(folder), prompts, first), theirs["first"], strict=True):
            assert row.logprobs is not None
            our_logprobs = row.logprobs[0].logprobs
            for token, value in expected.items():
                assert our_logprobs[int(token)] == pytest.approx(value, abs=0.2), (folder.name, token)
