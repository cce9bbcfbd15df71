"""A whole engine on a GPU compared with the same engine on the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import Activations, KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import DeviceConfig, DeviceType
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import complete, run_config, write_llama
from tests.helpers.random_adapters import write_random_adapter

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
PROMPTS = [[3 + i] * (5 * i + 1) for i in range(6)]
DECODE = DecodeConfig(max_new_tokens=24, ignore_eos=True)


def engine_on(device: str, folder: Path, scheme: str = "none", kv_cache: str = "none", **options: Any) -> Engine:
    """Return an engine in float32. The devices then differ only in the order of sums."""
    activations = Activations.dynamic if scheme in ("a8w8", "fp8") else Activations.none
    quant = QuantConfig(QuantScheme[scheme], activations=activations, kv_cache=KVCacheFormat[kv_cache])
    return load_engine(replace(run_config(folder), device=DeviceConfig(DeviceType[device], **options), quant=quant), 6)


def tokens(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [completion.token_ids for completion in complete(engine, prompts, DECODE)]


@pytest.mark.parametrize("kv_cache", ["none", "fp8"])
@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
def test_tokens_are_the_cpus_with_graphs_and_without(scheme: str, kv_cache: str, tmp_path: Path) -> None:
    write_llama(tmp_path)
    expected = tokens(engine_on("cpu", tmp_path, scheme, kv_cache))
    captured = engine_on("cuda", tmp_path, scheme, kv_cache)
    assert captured.executor.decode_steps.sizes == [1, 2, 4, 6]  # type: ignore[attr-defined]
    for layer in captured.executor.model.get_submodule("model.layers"):
        assert layer.self_attn.qkv.is_merged
        assert layer.mlp.gate_up.is_merged
    assert tokens(captured) == expected
    assert tokens(captured, PROMPTS[2:5]) == expected[2:5]  # three rows, padded to four
    assert tokens(engine_on("cuda", tmp_path, scheme, kv_cache, cuda_graphs=False)) == expected


@pytest.mark.parametrize("scheme", ["a8w8", "fp8"])
def test_activations_as_codes_run_in_graphs(scheme: str, tmp_path: Path) -> None:
    """Each device is compared with itself only, because an activation between two codes may be rounded differently on
    each device."""
    write_llama(tmp_path)
    assert tokens(engine_on("cuda", tmp_path, scheme)) == tokens(engine_on("cuda", tmp_path, scheme))


@pytest.mark.parametrize("scheme", ["none", "int8", "int4", "a8w8", "fp8"])
def test_mixtures_run_in_graphs(scheme: str) -> None:
    """The experts are computed together; one after the other they could not be captured."""
    captured = engine_on("cuda", GOLDENS / "mixtral", scheme)
    assert captured.executor.decode_steps.sizes == [1, 2, 4, 6]  # type: ignore[attr-defined]
    assert tokens(captured) == tokens(engine_on("cuda", GOLDENS / "mixtral", scheme, cuda_graphs=False))


@pytest.mark.parametrize("scheme", ["none", "int4"])
def test_rows_with_adapters_run_in_graphs(scheme: str, tmp_path: Path) -> None:
    """Steps with rows of two adapters and of none, and steps of rows without adapters, which have their own graphs."""
    write_llama(tmp_path / "base")
    for rank, name in ((3, "fr"), (20, "de")):
        model = engine_on("cpu", tmp_path / "base").executor.model
        write_random_adapter(tmp_path / name, model, rank, seed=rank, std=0.15)

    def adapted(device: str, names: list[str | None], **options: Any) -> list[list[int]]:
        engine = engine_on(device, tmp_path / "base", scheme, **options)
        for name in ("fr", "de"):
            engine.load_adapter(name, tmp_path / name)
        if options.get("cuda_graphs", device == "cuda"):
            assert engine.executor.adapted_steps.sizes == [1, 2, 4, 6]  # type: ignore[attr-defined]
        rows = enumerate(PROMPTS)
        requests = [engine.request(i, prompt, DECODE, adapter=names[i % len(names)]) for i, prompt in rows]
        outputs = sorted(engine.generate(requests), key=lambda output: output.request_id)
        return [output.completions[0].token_ids for output in outputs]

    for names in (["fr", None, "de"], [None]):
        expected = adapted("cpu", names)
        assert adapted("cuda", names) == expected
        assert adapted("cuda", names, cuda_graphs=False) == expected


def test_the_pool_takes_its_share_of_what_weights_leave(tmp_path: Path) -> None:
    write_llama(tmp_path)
    total = torch.cuda.mem_get_info()[1]
    engine = engine_on("cuda", tmp_path, memory_fraction=0.05, kv_cache_memory="0.5")
    pool = sum(tensor.nbytes for tensor in engine.executor.cache.tensors)
    assert 0.02 * total < pool <= 0.025 * total
    with pytest.raises(UserError, match="device.kv_cache_memory=.* is not possible here"):
        engine_on("cuda", tmp_path, memory_fraction=0.05, kv_cache_memory=str(int(0.06 * total)))
