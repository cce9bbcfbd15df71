"""Adapters that come and go by frames in the engine's process: results, memory, prefixes, and what is refused."""

import gc
import os
import random
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from conf.schema import Task
from conf.serving import ServeConfig
from conf.tasks import PredictConfig
from pipelines.engine.adapters import Adapters
from pipelines.replicas.engine_process.adapters import NoAdapter, change_adapters, find_adapter
from pipelines.replicas.engine_process.frames import AdapterChanged, Done, LoadAdapter, Submit, UnloadAdapter
from pipelines.replicas.engine_process.loading import Served, load_served
from tests.helpers.adapters import ALL_LINEAR, GREEDY, PROMPTS, load_with, outputs, write_adapter
from tests.helpers.builders import run_config, write_llama
from tests.helpers.engine_script import Script, serve

DECODE: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True, "logprobs": 2}
PROMPT = [*range(5, 25)]
NAMES = {"four": 4, "eight": 8, "sixteen": 16}  # ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama, `base`, and adapters of several ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    write_llama(folder / "base")
    for seed, (name, rank) in enumerate(NAMES.items()):
        write_adapter(folder / name, folder / "base", LlamaForCausalLM, seed, r=rank, target_modules=ALL_LINEAR)
    return folder


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    """A served model with two slots. After the test no block is lost."""
    run = run_config(folder / "base", max_adapters=2)
    run = replace(run, task=Task.serve, predict=PredictConfig(), serve=ServeConfig(batch_size=4))
    run = replace(run, device=replace(run.device, block_size=4))
    served = load_served(run, Script())  # type: ignore[arg-type]
    yield served
    served.engine.scheduler.check_integrity()
    assert served.engine.num_free_blocks == served.engine.num_blocks


def load(folder: Path, name: str, engine_name: str | None = None, **fields: Any) -> LoadAdapter:
    return LoadAdapter(7, engine_name or name, str(folder / name), [str(folder)], **fields)


def tokens(script: Script, id: int) -> list[int]:
    return script.samples(id)[0].token_ids


def expected(folder: Path, name: str | None) -> list[int]:
    """Return the tokens of an engine that has loaded the adapter with its model."""
    engine = load_with(run_config(folder / "base"), {name: folder / name} if name else {})
    (output,) = engine.generate([engine.request(0, PROMPT, DecodeConfig(**DECODE), adapter=name)])
    return output.completions[0].token_ids


@pytest.mark.long
def test_adapters_come_and_go_between_steps(folder: Path, served: Served) -> None:
    """A running request keeps its adapter, its prefixes are found until it is unloaded, and its memory is freed."""
    submits = [Submit(id, PROMPT, DECODE, adapter=name) for id, name in enumerate(["a#1", "a#2", "a#2"])]
    script = serve(
        served,
        [load(folder, "four", "a#1")],
        [submits[0]],
        [load(folder, "eight", "a#2"), submits[1]],  # while request 0 runs
        *[[]] * 30,
        [submits[2]],
    )
    assert [(frame.id, bool(frame.digest), frame.error) for frame in script.of(AdapterChanged)] == [(7, True, None)] * 2
    assert [tokens(script, id) for id in range(3)] == [expected(folder, name) for name in ("four", "eight", "eight")]
    assert [done.num_cached_tokens for done in script.of(Done)] == [0, 0, 16]
    engine = served.engine
    adapter = weakref.ref(next(iter(engine.adapters._adapters.values())))
    layer = engine.executor.model.get_submodule("model.layers.0.self_attn.q_proj")
    assert layer.adapters.max_rank == 8  # type: ignore[union-attr]
    blocks = engine.scheduler.block_manager
    assert len(set(blocks._adapter_of.values())) == 2
    script = serve(served, [UnloadAdapter(8, "a#2")], [Submit(3, PROMPT, DECODE, adapter="a#2")])
    assert script.of(AdapterChanged) == [AdapterChanged(8)]
    assert layer.adapters.max_rank == 4  # type: ignore[union-attr]
    serve(served, [UnloadAdapter(9, "a#1")])
    gc.collect()
    assert adapter() is None
    assert layer.adapters is None
    assert blocks.num_empty_blocks == blocks.num_blocks
    script = serve(
        served, [load(folder, "four"), Submit(4, PROMPT, DECODE, adapter="four")], [], [Submit(5, PROMPT, DECODE)]
    )
    assert script.of(Done)[0].num_cached_tokens == 0
    assert [tokens(script, 4), tokens(script, 5)] == [expected(folder, "four"), expected(folder, None)]


def test_only_adapters_below_the_folders_are_found(tmp_path: Path) -> None:
    """All paths without an adapter below the folders get the same words, so that they do not tell what exists."""
    below, out = tmp_path / "below", tmp_path / "below_not"
    for place in (below, out):
        (place / "fr").mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (place / "fr" / name).touch()
    below.joinpath("inner").symlink_to("fr")
    below.joinpath("link").symlink_to(out / "fr")
    below.joinpath("loop").symlink_to("loop")
    for name in ("file_out", "device", "pipe", "part"):
        (below / name).mkdir()
        (below / name / "adapter_config.json").touch()
    (below / "file_out" / "adapter_model.safetensors").symlink_to(out / "fr" / "adapter_model.safetensors")
    (below / "device" / "adapter_model.safetensors").symlink_to("/dev/zero")
    os.mkfifo(below / "pipe" / "adapter_model.safetensors")
    folders = [str(tmp_path / "none"), str(below)]
    for path in ("fr", str(below / "fr"), "inner", "./fr/", f"{below}//inner"):
        assert find_adapter(path, folders) == below.resolve() / "fr"
    wrong = ["", ".", "/", "link", "loop", "file_out", "device", "pipe", "part", "none", "fr/..", "../below/fr", "x\0y"]
    wrong += [
        "fr/adapter_config.json",
        "~/fr",
        "a" * 300,
        str(out / "fr"),
        str(out / "none"),
        "/etc/passwd",
        "/dev/zero",
    ]
    for path in wrong:
        with pytest.raises(NoAdapter) as error:
            find_adapter(path, folders)
        rest = " is not an adapter below serve.adapter_folders: give a folder with adapter_config.json and "
        assert str(error.value).startswith(f"lora_path={path[:200]}")
        assert str(error.value).partition(rest)[2] == "adapter_model.safetensors there, without `..`"
    with pytest.raises(NoAdapter):
        find_adapter("fr", [])


def write_damaged(adapter: Path, folder: Path) -> Iterator[str]:
    """Write copies of an adapter with a damaged header, damaged numbers, or a cut file, and yield their names."""
    draw, content = random.Random(0), (adapter / "adapter_model.safetensors").read_bytes()
    for i in range(40):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 40)):
            damaged[draw.randrange(0, 2000 if i % 2 else len(damaged))] = draw.choice((0, 255, 34, 123))
        end = draw.choice((len(damaged), draw.randrange(len(damaged))))
        shutil.copytree(adapter, folder / f"damaged{i}")
        (folder / f"damaged{i}" / "adapter_model.safetensors").write_bytes(damaged[:end])
        yield f"damaged{i}"


@pytest.mark.long
def test_what_cannot_be_loaded_leaves_the_engine_as_it_was(
    folder: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged adapters, an adapter of another model, too large a rank, and names that are wrong."""
    engine = served.engine
    engine.load_adapter("four", folder / "four")
    rows = [(PROMPTS[0], "four"), (PROMPTS[1], None)]
    before, ids = outputs(engine, rows), engine.adapters.ids

    def refused(frame: LoadAdapter | UnloadAdapter) -> str:
        changed = change_adapters(engine, frame)
        assert changed.error is not None
        assert (changed.digest, engine.adapters.ids) == (None, ids)
        assert outputs(engine, rows) == before
        return changed.error

    write_llama(tmp_path / "other", hidden_size=32)
    write_adapter(tmp_path / "wide", tmp_path / "other", LlamaForCausalLM, r=4, target_modules=["q_proj"])
    assert "the model and adapter_config.json need [4, 64]" in refused(load(tmp_path, "wide"))
    for name in write_damaged(folder / "eight", tmp_path):
        changed = change_adapters(engine, load(tmp_path, name))
        if changed.error is None:  # the damage is a valid number
            engine.unload_adapter(name)
        else:
            assert "the engine failed" not in changed.error
        assert engine.adapters.ids == ids
        assert outputs(engine, rows) == before
    for i, text in enumerate(
        ("", "[]", "{}", '{"peft_type": "LORA", "r": -1}', '{"peft_type": "IA3"}', "{" * 10**5, "\0")
    ):
        shutil.copytree(folder / "eight", tmp_path / f"config{i}")
        (tmp_path / f"config{i}" / "adapter_config.json").write_text(text)
        assert "the engine failed" not in refused(load(tmp_path, f"config{i}"))
    assert "has changed since it was loaded" in refused(load(folder, "eight", digest="0" * 64))
    assert "does not exist" in refused(UnloadAdapter(1, "none"))
    monkeypatch.setattr("pipelines.engine.adapters.free_memory", lambda device, fraction: 10_000)
    assert "adapter sixteen has rank 16: the tables of all slots need 0.00 GB" in refused(load(folder, "sixteen"))
    monkeypatch.setattr("pipelines.replicas.engine_process.adapters.free_memory", lambda device, fraction: 10_000)
    assert "and 10000 bytes are free: give a smaller adapter" in refused(load(folder, "sixteen"))
    group = engine.add(engine.request(0, PROMPTS[0], GREEDY, adapter="four"))
    assert "adapter four is in use" in (change_adapters(engine, UnloadAdapter(1, "four")).error or "")
    engine.cancel(group)
    monkeypatch.undo()
    monkeypatch.setattr(Adapters, "_fit_tables", lambda *arguments: 1 // 0)
    assert refused(load(folder, "sixteen")) == "the engine failed: the server's log says why"


@pytest.mark.long
def test_pinned_adapters_stay_resident(folder: Path, served: Served) -> None:
    """With two slots the two unpinned adapters replace each other."""
    engine = served.engine
    for name in NAMES:
        assert change_adapters(engine, load(folder, name, is_pinned=name == "four")).error is None
    for name in ("four", "eight", "sixteen", "eight", "sixteen"):
        outputs(engine, [(PROMPTS[0], name)])
        resident = [id.name for id in engine.adapters.slots.resident]
        assert resident == (["four"] if name == "four" else ["four", name])
    engine.unload_adapter("four")
    for name in ("eight", "sixteen"):
        outputs(engine, [(PROMPTS[0], name)])
    assert [id.name for id in engine.adapters.slots.resident] == ["eight", "sixteen"]


@pytest.mark.long
def test_equal_content_keeps_its_prefixes_until_the_last_name_goes(folder: Path, served: Served) -> None:
    engine, cached = served.engine, replace(GREEDY, prefix_cache=True)
    for name in ("a", "b"):
        engine.load_adapter(name, folder / "four")
    assert outputs(engine, [(PROMPT, "a")], cached)[0].num_cached_tokens == 0
    engine.unload_adapter("a")
    assert outputs(engine, [(PROMPT, "b")], cached)[0].num_cached_tokens == 16
    outputs(engine, [(PROMPT, None)], cached)
    engine.unload_adapter("b")
    engine.load_adapter("b", folder / "four")
    assert outputs(engine, [(PROMPT, "b")], cached)[0].num_cached_tokens == 0
    assert outputs(engine, [(PROMPT, None)], cached)[0].num_cached_tokens == 16
