"""The guarantees of models/README.md for a row, alone, in a batch and with any schedule: with the C++ kernels its bits,
else its tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from conf.decoding import DecodeConfig
from conf.quantization import KVCacheFormat, QuantConfig
from conf.schema import DType
from kernels import build
from pipelines.engine import Completion, Engine
from pipelines.engine.request import SequenceGroup
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import complete, run_config, write_llama
from tests.helpers.builders import engine_of as small_engine
from tests.helpers.cases import each
from tests.helpers.hybrid_families import HYBRID
from tests.helpers.tiers import tiers

PROMPTS = [[5, 6, 7], [8], list(range(9, 49)), [16, 17, 18, 19], [5, 6, 7], list(range(50, 60)), [1]]
DECODE = DecodeConfig(max_new_tokens=12, logprobs=20, prefix_cache=False)
THREADS = 3  # so that the operators split the work, unevenly
DEVICES: dict[str, dict[str, Any]] = {
    "chunks": {"max_batched_tokens": 9, "block_size": 4},
    "preemption": {"block_size": 4, "kv_cache_memory": "0"},
    "single-token blocks": {"block_size": 1},
}
needs_kernels = pytest.mark.skipif(build.library() is None, reason="torch's sums may run in an order of their own")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, hidden_size=128, intermediate_size=176, head_dim=32)
    return folder


KINDS = ["float32 none", "bfloat16 none", "float16 none", "float32 int4", "bfloat16 int8", "bfloat16 fp8"]


@pytest.fixture(
    scope="module",
    params=tiers(KINDS, quick=["float32 none", "bfloat16 int8"], long=KINDS),
)
def engine_of(folder: Path, request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Return a function that makes engines of one dtype and cache format, with the given fields of `device`."""
    dtype, kv_cache = request.param.split()
    run = replace(run_config(folder), quant=QuantConfig(kv_cache=KVCacheFormat[kv_cache]))

    def make(**device: Any) -> Engine:
        changed = replace(run.device, threads=THREADS, **device)
        return load_engine(replace(run, model=replace(run.model, dtype=DType[dtype]), device=changed), len(PROMPTS))

    return make


@pytest.fixture(scope="module")
def engine(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of()


def in_order(engine: Engine, order: list[int], batch_size: int) -> dict[int, Completion]:
    requests = [engine.request(i, PROMPTS[i], DECODE) for i in order]
    return {output.request_id: output.completions[0] for output in engine.generate(requests, batch_size)}


def test_old_values_in_the_pool_change_no_bit(engine_of: Callable[..., Engine]) -> None:
    """Blocks are reused: values after a sequence's end, from an earlier sequence, do not matter, even NaN and
    infinity."""
    torch.set_num_threads(THREADS)
    clean, dirty = engine_of(), engine_of()
    for i, tensor in enumerate(dirty.executor.cache.tensors):
        tensor.fill_((torch.nan, torch.inf)[i % 2] if tensor.dtype.is_floating_point else 99)
    assert in_order(dirty, [*range(7)], 3) == in_order(clean, [*range(7)], 3)
    beams = replace(DECODE, num_beams=3, logprobs=None)
    assert complete(dirty, PROMPTS[:3], beams) == complete(clean, PROMPTS[:3], beams)


@needs_kernels
def test_log_probabilities_are_the_same_to_the_bit_in_any_company(engine: Engine) -> None:
    torch.set_num_threads(THREADS)
    alone = {i: complete(engine, [prompt], DECODE)[0] for i, prompt in enumerate(PROMPTS)}
    for order in ([*range(7)], [*reversed(range(7))], [3, 0, 6, 2]):
        for batch_size in (2, 3, 7):
            together = in_order(engine, order, batch_size)
            assert together == {i: alone[i] for i in order}  # tokens, and float32 log probabilities without tolerance


@needs_kernels
@each("device", DEVICES.values())
def test_log_probabilities_are_the_same_to_the_bit_under_any_schedule(
    engine: Engine, engine_of: Callable[..., Engine], device: dict[str, Any], preempted: list[SequenceGroup]
) -> None:
    torch.set_num_threads(THREADS)
    preempted.clear()
    alone = {i: complete(engine, [prompt], DECODE)[0] for i, prompt in enumerate(PROMPTS)}
    if "kv_cache_memory" in device:  # as much as the longest row and one more need
        device = device | {"kv_cache_memory": str(4 * 20 * engine.executor.kv_bytes_per_token)}
    other = engine_of(**device)
    for prefix_cache in (False, True, True):  # with a prefix cache that has the prompts, the last time
        decode = replace(DECODE, prefix_cache=prefix_cache)
        requests = [other.request(i, prompt, decode) for i, prompt in enumerate(PROMPTS)]
        outputs = list(other.generate(requests, len(PROMPTS)))
        assert {output.request_id: output.completions[0] for output in outputs} == alone
    assert sum(output.num_cached_tokens for output in outputs) > 0
    assert bool(preempted) == ("kv_cache_memory" in device)


def test_without_the_kernels_greedy_tokens_are_equal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, even though the last bits of torch's products depend on the number of rows on every machine here."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, plain: Any = functional.linear) -> Tensor:
        result: Tensor = plain(x, weight, bias)
        return result * (1 + 2**-23 * (len(x) % 3))

    monkeypatch.setattr(build, "library", lambda: None)
    monkeypatch.setattr(functional, "linear", product)
    greedy = replace(DECODE, logprobs=None)

    def engine(**device: Any) -> Engine:
        run = run_config(folder)
        return load_engine(replace(run, device=replace(run.device, **device)), len(PROMPTS))

    first = engine()
    alone = [complete(first, [prompt], greedy)[0].token_ids for prompt in PROMPTS]
    small = {"kv_cache_memory": str(4 * 20 * first.executor.kv_bytes_per_token)}
    for other in (
        first,
        *(engine(**device | (small if "kv_cache_memory" in device else {})) for device in DEVICES.values()),
    ):
        assert [completion.token_ids for completion in complete(other, PROMPTS, greedy)] == alone


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return an engine whose pool fits one request of four beams, but not always four requests, which then preempt each
    other."""
    folder = tmp_path_factory.mktemp("narrow")
    memory = 16 * 4 * 128  # 16 blocks of 4 tokens with 2 heads of 8 float32 keys and values
    if request.param == "llama":
        write_llama(folder, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    else:
        sizes = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
        HYBRID["lfm2"].write(folder, hidden_size=32, intermediate_size=48, **sizes)
        memory += 32 * 2 * 32 * 4  # slots of 2 products of 32 channels
    return small_engine(folder, 4, max_batched_tokens=13, block_size=4, kv_cache_memory=str(memory))


def random_request(random: Random, id: int) -> tuple[list[int], DecodeConfig]:
    """Return a request with a prompt that may share a prefix, and any sampling settings; samples are seeded."""
    beginning = random.choice([[], [], [7] * 9, list(range(20, 33))])
    prompt = [*beginning, *(random.randrange(96) for _ in range(random.randrange(1, 12)))]
    settings = random.choice(
        [
            {},
            {"temperature": 1.0, "seed": id},
            {"temperature": 0.8, "top_p": 0.9, "seed": id, "n": random.randrange(2, 4)},
            {"num_beams": random.randrange(2, 5), "num_return_sequences": 2},
            {"penalty_alpha": 0.6, "top_k": 3},
            {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
            {"logprobs": 2, "prompt_logprobs": 1},
        ]
    )
    shared: dict[str, Any] = {"prefix_cache": random.random() < 0.7, "cache_salt": random.choice([None, "a"])}
    return prompt, DecodeConfig(max_new_tokens=random.randrange(1, 16), **settings, **shared)


@needs_kernels
@each("seed", range(2))
def test_random_requests_that_come_are_cancelled_and_give_way_are_as_alone(
    narrow: Engine, seed: int, preempted: list[SequenceGroup]
) -> None:
    preempted.clear()
    for state in narrow.executor.cache.states:
        state.fill_(torch.nan)  # old values of slots change nothing
    random, scheduler = Random(seed), narrow.scheduler
    blocks = scheduler.block_manager
    requests = [random_request(random, id) for id in range(25)]
    alone = [next(narrow.generate([narrow.request(id, *request)])) for id, request in enumerate(requests)]
    assert not preempted
    waiting, alive, ends = list(enumerate(requests)), [], dict[int, Any]()
    while waiting or alive:
        while waiting and random.random() < 0.5:
            id, request = waiting.pop()
            alive.append(narrow.add(narrow.request(id, *request)))
        if alive and random.random() < 0.02:
            scheduler.cancel(alive.pop(random.randrange(len(alive))))
        if alive:
            narrow.step()
        scheduler.check_integrity()
        for group in [group for group in alive if not group.sequences]:
            alive.remove(group)
            ends[group.request.id] = [one for _, one in sorted(group.completions.items())], group.prompt_logprobs
    assert blocks.num_free_blocks == blocks.num_blocks
    assert len(ends) > 10
    assert preempted
    assert ends == {id: (alone[id].completions, alone[id].prompt_logprobs or []) for id in ends}
