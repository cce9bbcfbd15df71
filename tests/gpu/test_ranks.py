"""Ranks that compute on GPUs: one NCCL rank in a graph, two ranks of one GPU over gloo, and two GPUs if available."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import Backend, DeviceConfig, DeviceType, ParallelConfig, ParallelMode
from kernels.collectives import RankFailed
from kernels.collectives.nccl import Nccl
from kernels.collectives.torch_group import serve_addresses
from kernels.cuda_graph import GraphPool
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import complete, run_config, write_llama

HOST = "127.0.0.1"
PROMPTS = [[3 + i] * (5 * i + 1) for i in range(6)]
DECODE = DecodeConfig(max_new_tokens=24, ignore_eos=True)
NEEDS_HYDRA = pytest.mark.skipif(find_spec("hydra") is None, reason="a rank reads its settings by Hydra")
TP, PP = {"mode": ParallelMode.tp, "tp": 2}, {"mode": ParallelMode.pp, "pp": 2}


def tokens(folder: Path, device: DeviceType, **parallel: Any) -> list[list[int]]:
    """Return the tokens of a float32 model; sums differ only in their order."""
    memory = {"kv_cache_memory": "64MB"}  # two ranks may share a GPU
    run = replace(
        run_config(folder),
        device=DeviceConfig(device, **memory),
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
    )
    engine = load_engine(run, 6)
    if device is DeviceType.cuda and parallel.get("backend") is not Backend.gloo:
        assert engine.executor.decode_steps.sizes == [1, 2, 4, 6]  # type: ignore[attr-defined]
    token_ids = [completion.token_ids for completion in complete(engine, PROMPTS, DECODE)]
    if parallel:
        engine.executor.driver.close()  # type: ignore[attr-defined]
    return token_ids


def test_nccl_of_one_rank_in_a_graph() -> None:
    server = serve_addresses(HOST)
    group = Nccl((HOST, server.port), "alone", 0, 1, HOST, server)
    x, owners = torch.zeros(3, 5, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    joined, first, owned = (torch.empty_like(x) for _ in range(3))

    def exchange() -> None:
        joined.copy_(group.gather(x, (5,)))
        gathered = group.gather_first(x + 1, (5,))
        assert gathered is not None
        first.copy_(gathered)
        owned.copy_(group.owned_rows(x + 2, owners))

    replay = GraphPool().capture(exchange)
    for _ in range(3):
        x.copy_(torch.randn(3, 5))
        replay()
        assert [tensor.equal(x + i) for i, tensor in enumerate((joined, first, owned))] == [True] * 3
    group.abort()
    with pytest.raises(RankFailed):
        group.check()


@NEEDS_HYDRA
@pytest.mark.parametrize("parallel_layout", [TP, PP], ids=["tp", "pp"])
def test_two_ranks_of_a_gpu_give_the_cpus_tokens_over_gloo(parallel_layout: dict[str, Any], tmp_path: Path) -> None:
    write_llama(tmp_path)
    expected = tokens(tmp_path, DeviceType.cpu)
    assert tokens(tmp_path, DeviceType.cuda, backend=Backend.gloo, **parallel_layout) == expected


@NEEDS_HYDRA
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@pytest.mark.parametrize("parallel_layout", [TP, PP], ids=["tp", "pp"])
def test_two_gpus_give_the_cpus_tokens_by_nccl(parallel_layout: dict[str, Any], tmp_path: Path) -> None:
    write_llama(tmp_path)
    assert tokens(tmp_path, DeviceType.cuda, **parallel_layout) == tokens(tmp_path, DeviceType.cpu)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="each rank has a GPU")
def test_nccl_wants_a_gpu_for_each_rank(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with pytest.raises(UserError, match="^2 ranks want a GPU each, but torch sees 1 here: give fewer ranks, or"):
        tokens(tmp_path, DeviceType.cuda, **TP)
