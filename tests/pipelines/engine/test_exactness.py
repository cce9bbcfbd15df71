"""What the README guarantees: a row is the same, to the bit, alone and in any company; its greedy tokens under any schedule."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.decoding import DecodeConfig
from conf.schema import DType, KVCacheFormat, QuantConfig
from pipelines.engine import Completion, Engine
from pipelines.loading import load_engine
from tests.builders import complete, run_config, write_llama

PROMPTS = [[5, 6, 7], [8], list(range(9, 49)), [16, 17, 18, 19], [5, 6, 7], list(range(50, 60)), [1]]
DECODE = DecodeConfig(max_new_tokens=12, logprobs=20, prefix_cache=False)
THREADS = 3  # so that the operators have something to split, and not evenly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, hidden_size=128, intermediate_size=176, head_dim=32)
    return folder


@pytest.fixture(
    scope="module", params=["float32 none", "bfloat16 none", "float32 int4", "bfloat16 int8", "bfloat16 fp8"]
)
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    dtype, kv_cache = request.param.split()
    run = replace(run_config(folder), quant=QuantConfig(kv_cache=KVCacheFormat[kv_cache]))
    device = replace(run.device, threads=THREADS)
    return load_engine(replace(run, model=replace(run.model, dtype=DType[dtype]), device=device), len(PROMPTS))


def in_order(engine: Engine, order: list[int], batch_size: int) -> dict[int, Completion]:
    requests = [engine.request(i, PROMPTS[i], DECODE) for i in order]
    return {output.request_id: output.completions[0] for output in engine.generate(requests, batch_size)}


def test_log_probabilities_are_the_same_to_the_bit_in_any_company(engine: Engine) -> None:
    torch.set_num_threads(THREADS)
    alone = {i: complete(engine, [prompt], DECODE)[0] for i, prompt in enumerate(PROMPTS)}
    for order in ([*range(7)], [*reversed(range(7))], [3, 0, 6, 2]):
        for batch_size in (2, 3, 7):
            together = in_order(engine, order, batch_size)
            assert together == {i: alone[i] for i in order}  # tokens, and float32 log probabilities without tolerance
