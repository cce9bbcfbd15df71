"""Processes that compute one model in stages or shards give the bits of one process."""

import gc
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import DeviceConfig, DeviceType, RunConfig
from conf.speculation import Speculate
from kernels import build
from pipelines.engine import Engine
from pipelines.engine.operations import finite_logits
from pipelines.engine.request import SequenceGroup
from pipelines.loading import start_driver
from pipelines.loading.driver import DriverExecutor
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_costs import model_costs
from pipelines.loading.model_source import resolve_model
from pipelines.ranks.launch import Rank, joined
from pipelines.ranks.messages import Channel
from tests.helpers.builders import KEY_VALUE_BYTES, run_config, write_llama
from tests.helpers.divided_engines import PROMPTS, answers, close, parallel
from tests.helpers.fork_server import true_starts
from tests.helpers.launchers import SRUN, TORCHRUN
from tests.helpers.tiers import tiers

pytestmark = pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")

IDLE_S = 3.0
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "log probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    "samples": {"temperature": 1.1, "n": 3, "seed": 5},
    "beams": {"num_beams": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "drafts": {"speculate": Speculate.ngram, "max_new_tokens": 40},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "stop_token_ids": [7]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, num_hidden_layers=3)
    return run_config(folder)


@pytest.fixture(
    scope="module", params=[(2, 1), (3, 1), (1, 2), (2, 2), (1, 3)], ids=lambda layout: "tp{} pp{}".format(*layout)
)
def engines(request: pytest.FixtureRequest, model: RunConfig) -> Iterator[tuple[Engine, Engine]]:
    """Return the engines of one process and of several; the model has two key heads."""
    cpus = os.sched_getaffinity(0)
    divided = load_engine(parallel(model, *request.param), 3)
    yield load_engine(model, 3), divided
    close(divided)
    assert os.sched_getaffinity(0) == cpus


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_ranks_answer_as_one_process_does(engines: tuple[Engine, Engine], case: str) -> None:
    decode = replace(DecodeConfig(max_new_tokens=24), **CASES[case])
    alone, divided = (answers(engine, decode) for engine in engines)
    assert divided == alone


def test_a_prefix_from_the_cache_gives_the_same(engines: tuple[Engine, Engine]) -> None:
    prompt, decode = list(range(20, 90)), DecodeConfig(max_new_tokens=8, logprobs=2)
    names = []
    for engine in engines:
        outputs = [next(engine.generate([engine.request(0, [*prompt, last], decode)])) for last in (3, 4)]
        assert outputs[1].num_cached_tokens > 0
        names.append([output.completions for output in outputs])
    assert names[0] == names[1]


def test_captured_steps_are_replayed(engines: tuple[Engine, Engine]) -> None:
    _, divided = engines
    decode = DecodeConfig(max_new_tokens=12)
    first = answers(divided, decode)
    steps: Any = divided.executor.decode_steps
    assert steps.can_record
    assert steps.shapes
    assert answers(divided, decode) == first


@pytest.mark.long
def test_ranks_that_wait_take_no_processor_time(engines: tuple[Engine, Engine]) -> None:
    _, divided = engines
    answers(divided, DecodeConfig(max_new_tokens=4))
    assert isinstance(divided.executor, DriverExecutor)
    pids = [process.pid for process in divided.executor.driver.workers.processes]
    before = [processor_s(pid) for pid in pids]
    time.sleep(IDLE_S)  # the measurement
    for pid, start in zip(pids, before, strict=True):
        assert processor_s(pid) - start < 0.01 * IDLE_S


def processor_s(pid: int) -> float:
    """Return the seconds of processor time of a process's threads, by the scheduler."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def test_hidden_states_of_whole_prompts(engines: tuple[Engine, Engine]) -> None:
    alone, divided = (engine.hidden_states(PROMPTS[:2], [3, 2]) for engine in engines)
    assert divided.equal(alone)
    assert finite_logits(engines[1].executor, divided).equal(finite_logits(engines[0].executor, alone))


@pytest.mark.parametrize(
    ("scheme", "degrees"),
    tiers(
        product((QuantScheme.int8, QuantScheme.int4), ((2, 1), (1, 2))),
        long=[(QuantScheme.int8, (2, 1)), (QuantScheme.int4, (1, 2))],
    ),
)
def test_quantised_models_with_a_cache_of_int8_that_is_too_small(
    model: RunConfig, scheme: QuantScheme, degrees: tuple[int, int], preempted: list[SequenceGroup]
) -> None:
    quant = QuantConfig(scheme=scheme, kv_cache=KVCacheFormat.int8)
    device = DeviceConfig(DeviceType.cpu, kv_cache_memory=str(80 * KEY_VALUE_BYTES), max_batched_tokens=16)
    small = replace(model, quant=quant, device=device)
    decode = DecodeConfig(max_new_tokens=40, prefix_cache=False)
    alone = answers(load_engine(small, 3), decode)
    num_preempted = len(preempted)
    divided = load_engine(parallel(small, *degrees), 3)
    assert answers(divided, decode) == alone
    assert len(preempted) > num_preempted > 0
    close(divided)


def test_counts_cover_all_ranks(engines: tuple[Engine, Engine]) -> None:
    alone, divided = (engine.executor for engine in engines)
    context = divided.driver.context.parallel_layout  # type: ignore[attr-defined]
    keys = max(context.tp, 2) / 2  # if three ranks share them, two have copies
    assert divided.kv_bytes_per_token == keys * alone.kv_bytes_per_token
    for rank_bytes, whole_bytes in (
        (divided.weight_bytes, alone.weight_bytes),
        (divided.step_weight_bytes(2), alone.step_weight_bytes(2)),
    ):
        assert whole_bytes <= rank_bytes < 1.3 * whole_bytes  # norms, and keys that two ranks have
        assert rank_bytes == whole_bytes or context.tp > 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("tp", "pp", "tied"), [(2, 1, False), (1, 2, False), (2, 2, False), (1, 2, True), (2, 1, True)]
)
def test_ranks_have_the_bytes_that_were_planned(tp: int, pp: int, tied: bool, tmp_path: Path) -> None:
    """The parts are whole steps of 16 outputs, which need no padding."""
    write_llama(tmp_path, num_hidden_layers=3, intermediate_size=96, head_dim=16, tie_word_embeddings=tied)
    run = parallel(run_config(tmp_path), tp, pp)
    _, costs = model_costs(run.model, run.quant, run.parallel, resolve_model(run.model), 16, packed=True)
    planned = sum(costs.rank(layers, tp, rank).weight_bytes for layers in costs.stages(pp) for rank in range(tp))
    divided = load_engine(run, 3)
    assert divided.executor.weight_bytes == planned
    close(divided)


@pytest.mark.long
def test_the_cache_has_the_blocks_of_the_rank_with_fewest(tmp_path: Path) -> None:
    """The second of three stages has two of four layers, and a third of the memory. Rank 0 alone would have twice as
    many blocks."""
    write_llama(tmp_path, num_hidden_layers=4)
    layer_bytes = 16 * KEY_VALUE_BYTES // 2  # of a block; KEY_VALUE_BYTES are of two layers
    device = DeviceConfig(DeviceType.cpu, kv_cache_memory=str(3 * 24 * layer_bytes))
    divided = load_engine(parallel(replace(run_config(tmp_path), device=device), 1, 3), 3)
    assert divided.executor.model.local_layers == range(1)
    assert divided.scheduler.block_manager.num_blocks == 24 // 2
    close(divided)


def test_the_memory_of_others_is_what_the_system_says(engines: tuple[Engine, Engine]) -> None:
    alone, divided = (engine.executor for engine in engines)
    processes = divided.driver.workers.processes  # type: ignore[attr-defined]
    status = [Path(f"/proc/{process.pid}/status").read_text() for process in processes]
    peaks = [int(text.partition("VmHWM:")[2].split()[0]) * 1024 for text in status]
    # the answer itself may use a page
    assert sum(peaks) <= divided.other_ranks_peak_bytes < sum(peaks) + (1 << 20)
    assert alone.other_ranks_peak_bytes == 0


def test_a_model_that_cannot_be_divided_is_one_line(model: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error precedes the start of the ranks, because the machine may lack memory for too many."""
    monkeypatch.setattr(start_driver, "spawn", lambda size: pytest.fail(f"{size} ranks"))
    with pytest.raises(UserError, match="tp=5 is more than the 4 query heads of this model: give at most 4"):
        load_engine(parallel(model, 5), 3)
    with pytest.raises(UserError, match="pp=400 is more than the model's 3 layers: give at most 3"):
        load_engine(parallel(model, 1, 400), 3)


@pytest.mark.long
def test_the_ranks_end_with_the_engine(model: RunConfig) -> None:
    divided = load_engine(parallel(model, 2), 3)
    executor: Any = divided.executor
    (process,) = executor.driver.workers.processes
    del divided, executor
    gc.collect()
    assert process.wait(10) is not None


@pytest.mark.long
@true_starts()
def test_the_ranks_outlive_the_thread_that_has_started_them(model: RunConfig) -> None:
    """With PR_SET_PDEATHSIG, Linux ends a process together with the thread that started it."""
    decode = DecodeConfig(max_new_tokens=8)
    with ThreadPoolExecutor(1) as threads:
        divided = threads.submit(load_engine, parallel(model, 2), 3).result()
    assert answers(divided, decode) == answers(load_engine(model, 3), decode)
    close(divided)


def test_a_script_that_a_launcher_has_started_several_times_is_one_line(
    model: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    wanted = "torchrun has started this script 2 times, but a model in Python starts its ranks itself: run it without torchrun"
    with pytest.raises(UserError, match=f"^{wanted}$"):
        load_engine(parallel(model, 2), 3)


def test_ranks_that_are_bound_keep_their_processors() -> None:
    """Slurm binds tasks like this. Otherwise ranks with the same processors would each get half of them."""
    context = joined(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    with socket.socket() as stream:
        for cpus, expected in (({2, 3}, [[0, 1], [2, 3]]), ({1, 2}, [None, None])):
            rank = Rank(1, 1, Channel(stream), cpus=frozenset(cpus))
            assert start_driver._cores(context, [rank], {0, 1}) == expected
