"""Adapters, prefixes, drafts and kept models on ranks: bit-identical to one process."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import ParallelConfig, ParallelMode, RunConfig
from conf.speculation import Speculate, SpeculationConfig
from kernels import build
from pipelines.engine import Engine
from pipelines.engine.adapters import AdapterChange, Adapters, LoadAdapter
from pipelines.jobs.output_folder import kept_folder
from pipelines.loading.driver import DriverExecutor
from pipelines.loading.load_engine import load_engine
from tests.helpers.adapters import ALL_LINEAR, Rows, completions, load_with, outputs, write_adapter
from tests.helpers.builders import generate, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import write_other
from tests.helpers.deepseek import NextTokenReference
from tests.helpers.drafts import PROMPTS, SETTINGS
from tests.helpers.kept_prefixes import BEGINNING, OTHER, complete, keep
from tests.helpers.soft_prefixes import write_paddle, write_peft
from tests.helpers.written_models import GMASK, SOP, WRITTEN, write_written

pytestmark = [pytest.mark.long, pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")]

ROWS: Rows = [([7, 3, 90, 20], "all"), ([5, 6], None), ([33, 41, 8], "some"), ([7, 3, 90, 20], "some"), ([12], "all")]
DRAFTED = SpeculationConfig(adaptive=False, num_tokens=3)
ADAPTED = DecodeConfig(max_new_tokens=8, ignore_eos=True, logprobs=3)


@contextmanager
def divided(run: RunConfig, tp: int = 2, batch_size: int = 3) -> Iterator[Engine]:
    """Return the engine of two stages for tp=1."""
    parallel = ParallelConfig(ParallelMode.tp, tp=tp) if tp > 1 else ParallelConfig(ParallelMode.pp, pp=2)
    engine = load_engine(replace(run, parallel=parallel), batch_size)
    assert isinstance(engine.executor, DriverExecutor)
    driver = engine.executor.driver
    try:
        yield engine
    finally:
        driver.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of all linear layers, of some, and one with a larger rank."""
    folder, kind = tmp_path_factory.mktemp("adapters"), LlamaForCausalLM
    write_adapter(folder / "all", llama, kind, 1, r=4, target_modules=ALL_LINEAR)
    # with PEFT's copy of the head, of which a rank has a part
    write_adapter(folder / "some", llama, kind, 2, r=8, target_modules=["q_proj", "o_proj", "down_proj", "lm_head"])
    write_adapter(folder / "large", llama, kind, 3, r=32, target_modules=ALL_LINEAR)
    return {name: str(folder / name) for name in ("all", "some", "large")}


def with_adapters(run: RunConfig, adapters: dict[str, str], max_adapters: int = 8) -> RunConfig:
    named = {name: adapters[name] for name in ("all", "some")}
    return replace(run, model=replace(run.model, adapters=named, max_adapters=max_adapters))


@pytest.mark.parametrize(("tp", "slots", "scheme"), [(2, 8, "none"), (3, 1, "none"), (2, 1, "int4"), (1, 1, "none")])
def test_adapters(llama: Path, adapters: dict[str, str], tp: int, slots: int, scheme: str) -> None:
    """With one slot, adapters replace each other."""
    run = replace(run_config(llama), quant=QuantConfig(QuantScheme[scheme]))
    run = with_adapters(run, adapters, slots)
    expected = completions(outputs(load_engine(run, 3), ROWS, ADAPTED))
    plain = completions(outputs(load_engine(run, 3), [(prompt, None) for prompt, _ in ROWS], ADAPTED))
    assert sum(a != b for a, b in zip(expected, plain, strict=True)) == 4
    with divided(run, tp) as engine:
        for _ in range(3):  # steps are recorded meanwhile
            assert completions(outputs(engine, ROWS, ADAPTED)) == expected


def test_ranks_refuse_an_adapter_that_is_another_one_for_a_rank(
    llama: Path, adapters: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another machine: it is replaced or removed after rank 0 has read it and before the other ranks read it."""
    folder, repeat, others = tmp_path / "some", Adapters._repeat_elsewhere, list[str | None]()

    def exchange_and_repeat(self: Adapters, change: AdapterChange) -> None:
        if isinstance(change, LoadAdapter) and others:
            shutil.rmtree(folder)
            if (other := others.pop()) is not None:
                shutil.copytree(adapters[other], folder)
        repeat(self, change)

    monkeypatch.setattr(Adapters, "_repeat_elsewhere", exchange_and_repeat)
    run = run_config(llama)
    with_one = replace(run, model=replace(run.model, adapters={"a": str(folder)}))
    wanted = r"^rank 1 \(process \d+\) has another adapter a than rank 0: give all machines the same files$"
    shutil.copytree(adapters["some"], folder)
    others += ["large"]
    with pytest.raises(UserError, match=wanted), divided(with_one):
        pass
    rows: Rows = [(prompt, name and "a") for prompt, name in ROWS]
    with divided(run) as engine:
        for other, message in (("large", wanted), (None, r"^rank 1 \(process \d+\): .* has no adapter_config.json")):
            shutil.copytree(adapters["some"], folder, dirs_exist_ok=True)
            others += [other]
            with pytest.raises(UserError, match=message):
                engine.load_adapter("a", folder)
            shutil.rmtree(folder, ignore_errors=True)
            assert engine.adapters.ids == []
        shutil.copytree(adapters["some"], folder)
        engine.load_adapter("a", folder)
        alone = load_with(run, {"a": folder})
        assert completions(outputs(engine, rows, ADAPTED)) == completions(outputs(alone, rows, ADAPTED))


def test_adapters_come_and_go(llama: Path, adapters: dict[str, str]) -> None:
    run = with_adapters(run_config(llama), adapters)
    alone = load_engine(run, 3)
    rows: Rows = [(prompt, name and "large") for prompt, name in ROWS]
    with divided(run) as engine:
        before = completions(outputs(alone, ROWS, ADAPTED))
        assert completions(outputs(engine, ROWS, ADAPTED)) == before
        for loader in (alone, engine):
            loader.load_adapter("large", adapters["large"])  # its rank exceeds the tables
        loaded = completions(outputs(alone, rows, ADAPTED))
        assert completions(outputs(engine, rows, ADAPTED)) == loaded != before
        for loader in (alone, engine):
            loader.load_adapter("some", adapters["large"])
            loader.unload_adapter("all")
        rows = [(prompt, name and "some") for prompt, name in ROWS]
        assert completions(outputs(engine, rows, ADAPTED)) == completions(outputs(alone, rows, ADAPTED)) == loaded
        with pytest.raises(UserError, match="adapter 'all' does not exist"):
            outputs(engine, ROWS, ADAPTED)
        with pytest.raises(UserError, match="adapter_config.json"):
            engine.load_adapter("none", llama)
        assert completions(outputs(engine, rows, ADAPTED)) == loaded


def test_an_adapter_comes_while_stages_compute(llama: Path, adapters: dict[str, str]) -> None:
    """Steps of other rows, in flight when the first row ends, use tables that are too small for it."""
    run = with_adapters(run_config(llama), adapters)
    alone = load_engine(run, 3)

    def finished(engine: Engine) -> list[Any]:
        decodes = [replace(ADAPTED, max_new_tokens=2 + 5 * i) for i in range(3)]
        rows = zip(ROWS, decodes, strict=False)
        requests = [
            engine.request(i, prompt, settings, adapter=name) for i, ((prompt, name), settings) in enumerate(rows)
        ]
        generated = engine.generate(requests)
        first = next(generated)
        engine.load_adapter("large", adapters["large"])
        return [output.completions for output in (first, *generated)]

    with divided(run, 1) as engine:
        assert finished(engine) == finished(alone)
        rows: Rows = [(prompt, name and "large") for prompt, name in ROWS]
        assert completions(outputs(engine, rows, ADAPTED)) == completions(outputs(alone, rows, ADAPTED))


@pytest.mark.parametrize(("tp", "kv_cache"), [(2, "none"), (3, "int8"), (1, "int8")])
def test_soft_prefixes(llama: Path, tmp_path: Path, tp: int, kv_cache: str) -> None:
    """Keys and values, and embeddings, which run through the sharded model."""
    write_paddle(tmp_path / "pre_caches.npy", 21)
    base = LlamaForCausalLM.from_pretrained(llama)
    write_peft(tmp_path / "tuned", base, "prompt_tuning", 9)
    named = {"stored": str(tmp_path / "pre_caches.npy"), "computed": str(tmp_path / "tuned")}
    run = replace(run_config(llama, prefixes=named), quant=QuantConfig(kv_cache=KVCacheFormat[kv_cache]))
    alone = load_engine(run, 3)
    with divided(run, tp) as engine:
        results = [[complete(loaded, OTHER, prefix=name) for name in (None, *named)] for loaded in (alone, engine)]
    said = [[output.completions for output in outputs] for outputs in results]
    assert said[0] == said[1]
    assert said[0][0] != said[0][1] != said[0][2] != said[0][0]


@each("family", WRITTEN)
def test_soft_prefixes_of_other_families(tmp_path: Path, family: str) -> None:
    """ALiBi's slopes of a rank's heads, and masks and scales that count the prefix, on ranks and on stages."""
    write_written(tmp_path, family)
    write_paddle(tmp_path / "p.npy", 21, heads=4)
    run = run_config(tmp_path, prefixes={"p": str(tmp_path / "p.npy")})
    prompt = [*OTHER, GMASK, SOP] if family == "chatglm" else OTHER
    alone = complete(load_engine(run, 3), prompt, prefix="p").completions
    for tp in (2, 1):
        with divided(run, tp) as engine:
            assert complete(engine, prompt, prefix="p").completions == alone


def test_a_prefix_of_another_model_is_refused_by_the_whole_models_sizes(llama: Path, tmp_path: Path) -> None:
    write_paddle(tmp_path / "pre_caches.npy", 5, heads=1)
    run = run_config(llama, prefixes={"story": str(tmp_path / "pre_caches.npy")})
    with pytest.raises(UserError, match=r"is \[2, 2, 1, 5, 16\], but the model needs .* = \[2, 2, 2, 5, 16\]"):
        load_engine(replace(run, parallel=ParallelConfig(ParallelMode.tp, tp=2)), 3)


@pytest.mark.parametrize(
    ("family", "tp", "kv_cache"), [("gpt_oss", 2, "int4"), ("llama", 3, "none"), ("gemma3", 1, "int8")]
)
def test_kept_prefixes(llama: Path, tmp_path: Path, family: str, tp: int, kv_cache: str) -> None:
    """Layers with windows have blocks of their own, also in the other stage."""
    folder = llama
    if family != "llama":
        folder = tmp_path / family
        write_other(folder, family, max_position_embeddings=1024)
    run = replace(run_config(folder), quant=QuantConfig(kv_cache=KVCacheFormat[kv_cache]))
    keep(run, tmp_path / "kept")
    prompt = [*BEGINNING, 3, 4]
    expected = complete(load_engine(run, 3), prompt).completions
    with_file = replace(run, device=replace(run.device, kept_prefixes=[str(tmp_path / "kept")]))
    with divided(with_file, tp) as engine:
        assert (engine.executor.cache.num_window_blocks > 0) == (family != "llama")
        output = complete(engine, prompt)
    assert output.num_cached_tokens == 32
    assert output.completions == expected


def test_a_kept_prefix_of_a_model_with_latents(tmp_path: Path) -> None:
    """Every rank has all latents."""
    folder = tmp_path / "deepseek"
    NextTokenReference(folder)
    run = run_config(folder)
    keep(run, tmp_path / "kept")
    expected = complete(load_engine(run, 3), BEGINNING).completions
    with divided(replace(run, device=replace(run.device, kept_prefixes=[str(tmp_path / "kept")]))) as engine:
        output = complete(engine, BEGINNING)
    assert output.num_cached_tokens == 32
    assert output.completions == expected


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.matrix), 1])
def test_a_model_drafts(llama: Path, tmp_path: Path, tp: int) -> None:
    """The draft model equals the model, so drafts are accepted; rank 0 has it whole."""
    run = run_config(llama)
    model_drafts = replace(DRAFTED, model_path=str(llama))
    with_model = replace(run, decode=replace(run.decode, speculate=Speculate.model, speculation=model_drafts))
    check_drafts(with_model, tp, Speculate.model)


def test_the_next_tokens_layer_drafts(tmp_path: Path) -> None:
    """Every rank has the whole layer, and part of the head; acceptance equals one process's."""
    NextTokenReference(tmp_path, intermediate_size=64, moe_intermediate_size=64, n_routed_experts=64)
    run = run_config(tmp_path)
    check_drafts(replace(run, decode=replace(run.decode, speculate=Speculate.mtp)), 2, Speculate.mtp)


def check_drafts(run: RunConfig, tp: int, kind: Speculate) -> None:
    """Compare answers with one process's, twice, the second time with the prefix cache; acceptance is equal."""
    alone = load_engine(run, 3)
    with divided(run, tp) as engine:
        for name in ("greedy", "penalties", "three samples"):
            decode = replace(SETTINGS[name], speculate=kind, speculation=DRAFTED)
            for _ in range(2):
                expected, actual = (
                    [output.completions for output in generate(loaded, PROMPTS, decode)] for loaded in (alone, engine)
                )
                assert actual == expected
        assert engine.speculator.counts == alone.speculator.counts
        assert engine.speculator.counts.num_accepted_tokens > 0


@pytest.mark.parametrize("tp", [2, 1])
def test_a_model_is_kept_packed_in_a_file_for_each_rank(llama: Path, tp: int) -> None:
    run = replace(run_config(llama, keep_packed=True), quant=QuantConfig(QuantScheme.int8))
    expected = complete(load_engine(replace(run, model=replace(run.model, keep_packed=False)), 3), OTHER).completions
    known, made = files_of(llama), []
    try:
        for _ in range(2):
            with divided(run, tp) as engine:
                assert complete(engine, OTHER).completions == expected
            made.append({path: path.stat().st_ino for path in files_of(llama) - known})
    finally:
        for path in files_of(llama) - known:
            path.unlink()
    assert len(made[0]) == 2
    assert made[0] == made[1]  # the second start writes no file


def files_of(model: Path) -> set[Path]:
    return set(kept_folder("packed").glob(f"{model.name}-*"))
