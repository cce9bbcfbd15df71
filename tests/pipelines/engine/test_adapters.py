"""Rows with adapters: PEFT's results, and a row's bits do not depend on the batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from pipelines.engine import Engine
from tests.helpers.adapters import (
    ALL_LINEAR,
    GREEDY,
    PROMPTS,
    RANKS,
    Rows,
    check_as_peft,
    completions,
    load_with,
    outputs,
    peft_model,
    write_adapter,
)
from tests.helpers.builders import engine_of, run_config, write_llama

NAMES = [*RANKS, None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama, `base`, and its adapters, each with another rank and other layers."""
    folder = tmp_path_factory.mktemp("adapters")
    write_llama(folder / "base")
    for seed, (name, rank) in enumerate(RANKS.items()):
        modules = ALL_LINEAR if seed % 2 else ["q_proj", "v_proj", "down_proj"]
        write_adapter(
            folder / name, folder / "base", LlamaForCausalLM, seed, r=rank, lora_alpha=rank, target_modules=modules
        )
    return folder


def engine_with(models: Path, names: list[str | None] = NAMES, max_adapters: int = 8, **device: Any) -> Engine:
    run = run_config(models / "base", max_adapters=max_adapters)
    adapters = {name: models / name for name in names if name}
    return load_with(replace(run, device=replace(run.device, **device)), adapters)


def test_as_peft_unmerged(models: Path) -> None:
    """Four adapters of ranks 4 to 64 and none in one batch: greedy tokens, and log probabilities within 1e-4, both in
    float32."""
    peft = peft_model(models / "base", LlamaForCausalLM, {name: models / name for name in RANKS})
    rows = list(zip(PROMPTS, NAMES, strict=True))
    results = outputs(engine_with(models), rows)
    check_as_peft(peft, rows, results)
    base = outputs(engine_with(models), [(prompt, None) for prompt in PROMPTS])
    pairs = zip(results[:4], base[:4], strict=True)
    assert all(mine.completions[0].token_ids != plain.completions[0].token_ids for mine, plain in pairs)


def test_rows_alone_and_together(models: Path) -> None:
    """Equal log probability bits: alone, mixed, in chunks, after a preemption, and if adapters replace each other in
    one slot."""
    rows = [*zip(PROMPTS, NAMES, strict=True), ([7, 3, 90, 20], "eight"), ([7, 3, 90, 20], None)]
    engine = engine_with(models)
    alone = [outputs(engine, [row])[0] for row in rows]
    assert outputs(engine, rows) == [replace(output, request_id=i) for i, output in enumerate(alone)]
    bytes_per_token = engine.executor.kv_bytes_per_token
    for device in (
        {"max_batched_tokens": 5, "block_size": 4},
        {"block_size": 4, "kv_cache_memory": str(8 * 4 * bytes_per_token)},
        {"threads": 1},
    ):
        assert completions(outputs(engine_with(models, **device), rows)) == completions(alone)
    assert completions(outputs(engine_with(models, max_adapters=1), rows)) == completions(alone)
    assert completions(outputs(engine_with(models, max_adapters=1), rows[::-1])) == completions(alone[::-1])


@pytest.mark.long
def test_other_ranks_and_residency_change_no_bit(models: Path) -> None:
    """Rows of an adapter equal those of an engine that has only this adapter."""
    rows = list(zip(PROMPTS, NAMES, strict=True))
    mixed = outputs(engine_with(models), rows)
    for (prompt, name), output in zip(rows, mixed, strict=True):
        assert outputs(engine_with(models, [name]), [(prompt, name)])[0].completions == output.completions


def test_rows_without_an_adapter_match_an_engine_without(models: Path) -> None:
    plain = engine_of(models / "base", 5)
    rows: Rows = [(prompt, None) for prompt in PROMPTS]
    expected = outputs(plain, rows)
    engine = engine_with(models)
    assert outputs(engine, rows) == expected
    mixed = outputs(engine, [*rows[:2], (PROMPTS[2], "four"), rows[3]])
    assert completions([mixed[i] for i in (0, 1, 3)]) == completions([expected[i] for i in (0, 1, 3)])


def test_batches_without_adapters_have_the_shapes_of_before(models: Path) -> None:
    engine, plain = engine_with(models), engine_of(models / "base", 5)
    for loaded in (engine, plain):
        outputs(loaded, [(prompt, None) for prompt in PROMPTS])
    assert engine.executor.decode_steps.shapes == plain.executor.decode_steps.shapes  # type: ignore[attr-defined]
    assert all(shape.num_adapted == 0 for shape in engine.executor.decode_steps.shapes)  # type: ignore[attr-defined]


def test_beams_samples_and_searches(models: Path) -> None:
    """All sequences of a request have its adapter."""
    engine = engine_with(models)
    for settings in (
        {"num_beams": 3, "num_return_sequences": 3},
        {"n": 3, "temperature": 1.0, "seed": 1},
        {"penalty_alpha": 0.5, "top_k": 4},
    ):
        decode = DecodeConfig(max_new_tokens=5, ignore_eos=True, **settings)  # type: ignore[arg-type]
        rows = list(zip(PROMPTS[:2], NAMES[:2], strict=True))
        alone = [outputs(engine, [row], decode)[0].completions for row in rows]
        assert completions(outputs(engine, rows, decode)) == alone
        assert completions(outputs(engine, [(PROMPTS[0], None)], decode)) != alone[:1]


def test_recorded_steps_survive_a_load(models: Path) -> None:
    """There is one slot, which then contains another adapter. The step is replayed and reads it."""
    engine = engine_with(models, ["sixty_four", "four", "eight"], max_adapters=1)
    first = outputs(engine, [(PROMPTS[0], "sixty_four")])
    shapes = engine.executor.decode_steps.shapes  # type: ignore[attr-defined]
    assert any(shape.num_adapted for shape in shapes)
    executor = engine.executor
    for name in ("four", "eight", "sixty_four"):
        again = outputs(engine, [(PROMPTS[0], name)])
        assert completions(again) == completions(outputs(engine_with(models, [name]), [(PROMPTS[0], name)]))
    assert again == first
    assert engine.executor is executor
    assert engine.executor.decode_steps.shapes == shapes  # type: ignore[attr-defined]


def test_a_larger_rank_is_loaded_later(models: Path) -> None:
    engine = engine_with(models, ["four"])
    before = outputs(engine, [(PROMPTS[0], "four")])
    engine.load_adapter("large", models / "sixty_four")
    expected = outputs(engine_with(models), [(PROMPTS[1], "sixty_four")])
    assert completions(outputs(engine, [(PROMPTS[1], "large")])) == completions(expected)
    assert outputs(engine, [(PROMPTS[0], "four")]) == before
    plain = engine_of(models / "base", 5)
    plain.load_adapter("large", models / "sixty_four")
    assert completions(outputs(plain, [(PROMPTS[1], "large")])) == completions(expected)


def test_the_prefix_cache_knows_the_content(models: Path) -> None:
    """Another adapter with the same name finds no blocks of the old one, nor does the base; equal content does."""
    prompt = [*range(5, 15), 20, 21]
    cached = replace(GREEDY, prefix_cache=True)
    engine = engine_with(models, ["four", "eight"], block_size=4)
    first = outputs(engine, [(prompt, "four")], cached)[0]
    assert first.num_cached_tokens == 0
    assert outputs(engine, [(prompt, "four")], cached)[0] == replace(first, num_cached_tokens=8)
    for name in ("eight", None):
        fresh = outputs(engine_with(models, block_size=4), [(prompt, name)])
        assert outputs(engine, [(prompt, name)], cached) == fresh
    engine.load_adapter("same", models / "four")
    assert outputs(engine, [(prompt, "same")], cached)[0] == replace(first, num_cached_tokens=8)
    engine.load_adapter("four", models / "sixteen")
    assert outputs(engine, [(prompt, "same")], cached)[0] == replace(first, num_cached_tokens=8)
    changed = outputs(engine, [(prompt, "four")], cached)[0]
    assert changed.num_cached_tokens == 0
    assert changed.completions == outputs(engine_with(models), [(prompt, "sixteen")])[0].completions
    engine.unload_adapter("same")
    engine.load_adapter("same", models / "four")
    assert outputs(engine, [(prompt, "same")], cached)[0] == first  # computed again: its prefixes were forgotten


def test_the_least_recently_used_goes_first(models: Path) -> None:
    engine = engine_with(models, max_adapters=2)
    for name, resident in (
        ("four", ["four"]),
        ("eight", ["four", "eight"]),
        ("four", ["eight", "four"]),
        ("sixteen", ["four", "sixteen"]),
    ):
        outputs(engine, [(PROMPTS[0], name)])
        assert [id.name for id in engine.adapters.slots.resident] == resident


def test_a_row_waits_for_a_slot(models: Path) -> None:
    engine = engine_with(models, max_adapters=1)
    groups = [engine.add(engine.request(i, PROMPTS[i], GREEDY, adapter=name)) for i, name in enumerate(NAMES[:3])]
    engine.step()
    assert [bool(group.adapter_slot >= 0) for group in groups] == [True, False, False]
    assert [group in engine.scheduler.running for group in groups] == [True, False, False]
    while any(group.sequences for group in groups):
        engine.step()
        assert sum(group.adapter_slot >= 0 for group in groups) <= 1
    alone = outputs(engine_with(models), list(zip(PROMPTS[:3], NAMES[:3], strict=True)))
    assert [group.output().completions for group in groups] == completions(alone)


def test_unloading(models: Path) -> None:
    engine = engine_with(models, ["four", "eight"], max_adapters=1)
    request = engine.request(0, PROMPTS[0], GREEDY, adapter="four")
    waiting = engine.request(1, PROMPTS[1], GREEDY, adapter="eight")
    groups = [engine.add(request), engine.add(waiting)]
    for name in ("four", "eight"):
        with pytest.raises(UserError, match=f"adapter {name} is in use: unload or replace it when its"):
            engine.unload_adapter(name)
        with pytest.raises(UserError, match=f"adapter {name} is in use"):
            engine.load_adapter(name, models / "sixteen")
    for group in groups:
        engine.scheduler.cancel(group)
    engine.unload_adapter("four")
    with pytest.raises(UserError, match="adapter 'four' does not exist: there are eight"):
        engine.request(0, PROMPTS[0], GREEDY, adapter="four")
    (output,) = engine.generate([request])
    assert "adapter four was unloaded since the request was made" in str(output.error)
    engine.unload_adapter("eight")
    with pytest.raises(UserError, match=r"adapter 'eigth' does not exist: there are none: give model\.adapters"):
        engine.request(0, PROMPTS[0], GREEDY, adapter="eigth")
    with pytest.raises(UserError, match="adapter 'eight' does not exist"):
        engine.unload_adapter("eight")
