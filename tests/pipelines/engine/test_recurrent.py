"""Models with recurrent layers: the bits of a row in any company and schedule, the slots of its states, and what such
models refuse."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors import safe_open

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, KVCacheScales, QuantConfig, QuantScheme
from conf.schema import DType
from conf.speculation import Speculate, SpeculationConfig
from kernels import build
from kernels.collectives import Threads
from models.formats.safetensors_writer import save_tensors
from models.parallel import stage_layers
from models.sharding import ParallelLayout
from pipelines.engine import Engine, snapshots
from pipelines.engine.recorded_steps import RecordedSteps
from pipelines.engine.request import SequenceGroup
from pipelines.loading.kept_prefixes import open_kept, place_kept
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_costs import model_costs
from pipelines.loading.model_source import resolve_model
from pipelines.replicas.engine_process.loading import described
from tests.helpers import divided_engines, kept_prefixes
from tests.helpers.builders import all_logits, complete, generate, run_config, write_llama
from tests.helpers.calibrated_ranks import quantized_by
from tests.helpers.divided import plan_of, rank_plan, stage_steps, whole_steps
from tests.helpers.drafts import Hostile
from tests.helpers.exports import Exports
from tests.helpers.family import noted
from tests.helpers.hybrid_families import HYBRID
from tests.helpers.kept_prefixes import BEGINNING, keep
from tests.helpers.observed_steps import look_ahead, pad
from tests.helpers.oracle import contrastive_search
from tests.helpers.quantized_models import CALIBRATED
from tests.helpers.soft_prefixes import write_paddle
from tests.helpers.tiers import tiers

PROMPTS = [[5, 6, 7], [8], list(range(9, 49)), [16, 17, 18, 19], [5, 6, 7], list(range(50, 60)), [1]]
SHORT = [prompt for prompt in PROMPTS if len(prompt) < 10]
ROWS = DecodeConfig(max_new_tokens=12, logprobs=20)
DRAWN = DecodeConfig(
    max_new_tokens=12, temperature=1.3, seed=5, ignore_eos=True
)  # steps with these settings look ahead
SEARCHES = [
    DecodeConfig(max_new_tokens=9, num_beams=3, num_return_sequences=3),
    DecodeConfig(max_new_tokens=9, n=4, temperature=1.0, seed=3, logprobs=1),
    DecodeConfig(max_new_tokens=9, penalty_alpha=0.6, top_k=4),
]
SCHEDULES: list[dict[str, Any]] = [
    {"threads": 1},
    {"max_batched_tokens": 9, "block_size": 4},
    {"block_size": 1},
    {"block_size": 4},
]
FEW_BLOCKS = 14  # of four tokens: enough for one row, not for all
FLOAT_PARTS = "conv.conv", "conv1d", "A_log", "dt_bias", ".D_", "norm", ".gate.", ".router."
"""Parts of the names of further tensors that no scheme quantises."""
FLOAT_GATES = "in_proj_a. in_proj_b .f_a_proj .f_b_proj .g_a_proj .g_b_proj .b_proj".split()
MORE_QUANT = {"bfloat16": QuantConfig(scheme=QuantScheme.int8, kv_cache=KVCacheFormat.int8)}
MOST_RANKS = {  # one rank too many, and the heads that are too few
    "mamba2": (9, "8 heads of a recurrent layer"),
    "qwen3_next": (3, "2 key heads of a recurrent layer"),
}


@pytest.fixture(scope="module", params=tiers(HYBRID, quick=["lfm2", "qwen3_5_text"], long=HYBRID))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of the architecture whose first layer is recurrent."""
    folder = tmp_path_factory.mktemp("hybrid")
    HYBRID[request.param].write(folder, **HYBRID[request.param].variants[0])
    return folder


@pytest.fixture(scope="module")
def made(folder: Path, exports: Exports) -> Path:
    """Return the export of the checkpoint in float32."""
    return exports.of(run_config(folder))


def engine_of(folder: Path, dtype: str = "float32", batch_size: int = 7, **device: Any) -> Engine:
    run = run_config(folder)
    run = replace(run, model=replace(run.model, dtype=DType[dtype]), quant=MORE_QUANT.get(dtype, QuantConfig()))
    return load_engine(replace(run, device=replace(run.device, **{"threads": 3, **device})), batch_size)


@pytest.mark.skipif(build.library() is None, reason="torch's sums may run in an order of their own")
def test_bits_are_the_same_in_any_company_and_schedule(folder: Path, made: Path, preempted: list[Any]) -> None:
    """Searches fork and drop sequences whose states share a slot. The pools begin with NaN, and slots are reused at once.

    Alone, a row is computed without recorded steps. The exported model runs in small steps, and with preemption.
    """
    for dtype in ("float32", "bfloat16"):
        engine = engine_of(folder, dtype)
        engine.executor.stop_recording()
        alone = [complete(engine, [prompt], ROWS)[0] for prompt in PROMPTS]
        drawn = [complete(engine, [prompt], DRAWN)[0] for prompt in PROMPTS]
        searched = [[complete(engine, [prompt], decode)[0] for prompt in SHORT] for decode in SEARCHES]
        runs = [(folder, schedule) for schedule in (None, {}, *SCHEDULES)]
        for model, schedule in runs + [(made, schedule) for schedule in SCHEDULES[1::2]] * (dtype == "float32"):
            other = engine_of(model, dtype, **(schedule or {}))
            if schedule is SCHEDULES[-1]:
                manager = other.scheduler.block_manager
                manager.pin(manager.allocate(manager.num_free_blocks - FEW_BLOCKS))
                other.requests = replace(other.requests, num_blocks=FEW_BLOCKS)
            fill_pools(other)
            decode_steps, ahead = other.executor.decode_steps, look_ahead(other)
            if schedule is None:
                pad(other, 3)  # decode steps as in a CUDA graph
            with noted((model, dtype, schedule)):
                for in_order in (list, reversed):
                    assert complete(other, [*in_order(PROMPTS)], ROWS) == [*in_order(alone)]
                assert complete(other, PROMPTS, DRAWN) == drawn
                assert any(ahead) or schedule == {"block_size": 1}  # there each token may leave a snapshot
                assert schedule is None or (isinstance(decode_steps, RecordedSteps) and decode_steps.shapes)
                for decode, expected in zip(SEARCHES, searched, strict=True):
                    assert complete(other, SHORT, decode) == expected
                other.scheduler.check_integrity()
        assert preempted
        preempted.clear()


@pytest.mark.long
def test_searches_have_the_results_of_whole_texts(folder: Path, tmp_path: Path) -> None:
    """Beams and contrastive search as transformers computes them without a cache. Samples as one prompt, to the bit."""
    name = json.loads((folder / "config.json").read_text())["model_type"]
    model, engine = HYBRID[name].write(tmp_path, **HYBRID[name].variants[0]), engine_of(folder)
    beams, samples, contrastive = (generate(engine, SHORT, decode) for decode in SEARCHES)
    for prompt, found, drawn, chosen in [*zip(SHORT, beams, samples, contrastive, strict=True)][:1]:
        ids = torch.tensor([prompt])
        settings = {
            "num_beams": 3,
            "num_return_sequences": 3,
            "max_new_tokens": 9,
            "pad_token_id": 0,
            "use_cache": False,
        }
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
        assert [row.token_ids for row in found.completions] == expected[:, len(prompt) :].tolist()
        assert chosen.completions[0].token_ids == contrastive_search(model, prompt, 0.6, 4, 9)
        assert len({(*row.token_ids,) for row in drawn.completions}) == 4
        for row in drawn.completions:
            whole = DecodeConfig(max_new_tokens=1, prompt_logprobs=1, prefix_cache=False)
            (output,) = generate(engine, [prompt + row.token_ids], whole)
            assert output.prompt_logprobs
            assert row.logprobs == output.prompt_logprobs[len(prompt) - 1 :]


def fill_pools(engine: Engine) -> None:
    """Fill keys, values and states with NaN and infinity, and codes with a number."""
    for i, tensor in enumerate([*engine.executor.cache.tensors, *engine.executor.cache.states]):
        tensor.fill_((torch.nan, torch.inf)[i % 2] if tensor.dtype.is_floating_point else 99)


def slot_bytes(engine: Engine) -> int:
    return sum(state[0].nbytes for state in engine.executor.cache.states)


def test_prompts_are_computed_whole_and_nothing_leaks(folder: Path) -> None:
    """Scores take no slot; cancelled, failed and finished requests give theirs back."""
    engine = engine_of(folder, batch_size=2)
    manager = engine.scheduler.state_manager
    slot = described(engine, engine.requests.resolve(DecodeConfig()), None).state_slot
    assert re.fullmatch(r"1 slot of recurrent states = \d+\.\d\d MB( = [\d,]+ tokens of KV)?; \d+ slots", slot)
    hidden = engine.hidden_states(PROMPTS[:2], [3, 1])
    expected = torch.cat((all_logits(engine, PROMPTS[0]), all_logits(engine, PROMPTS[1])))
    torch.testing.assert_close(engine.executor.model.logits(hidden), expected)
    groups = [engine.add(engine.request(i, prompt, ROWS)) for i, prompt in enumerate(PROMPTS[:4])]
    engine.step()
    assert [len(group.sequences[0].state_slots) for group in groups] == [1, 1, 0, 0]  # two run at once
    engine.cancel(groups[0])
    for state in engine.executor.cache.states:
        state[groups[1].sequences[0].state_slots[0]] = torch.nan
    while any(group.sequences for group in groups[1:]):
        engine.step()
        engine.scheduler.check_integrity()
    errors = [group.error is not None for group in groups]
    assert errors == [False, True, False, False]  # the NaN ends its row alone
    alone = complete(engine_of(folder), PROMPTS[2:4], ROWS)
    assert [group.completions[0] for group in groups[2:]] == alone  # in the slot that held NaN
    # two for each of 16 sequences, and one for 256 tokens of each sequence's context; a Mamba-2 without a context limit
    # fills half of the free memory
    if engine.executor.cache.tensors:
        assert manager.num_slots == 32 + 16 * engine.executor.model.config.context_length // 256


EOS = 1
SYSTEM = [*range(30, 60), EOS]
QUESTIONS = [[*range(60 + i, 74 + i), EOS, 4] for i in range(3)]


def with_eos(folder: Path, copy: Path) -> Path:
    copytree(folder, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return copy


def nan_in_state(engine: Engine, row: SequenceGroup) -> None:
    for state in engine.executor.cache.states:
        state[row.sequences[0].state_slots[-1]] = torch.nan


ROW_EVENTS: dict[str, Callable[[Engine, SequenceGroup], None]] = {
    "preempted": lambda engine, row: engine.scheduler._preempt(row),
    "cancelled": Engine.cancel,
    "NaN": nan_in_state,
}


def test_a_row_may_end_or_give_way_after_each_token(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing leaks. The other rows, one of which gets the slot of the first one, have their bits. A step of lookahead is
    dropped with its row."""
    monkeypatch.setattr(snapshots, "MIN_TOKENS", 4)
    prompts = [[*range(5, 11), EOS, *range(12, 16)], [8], [16, 17, 18]]
    for decode, events in ((replace(ROWS, ignore_eos=True), [*ROW_EVENTS]), (DRAWN, ["cancelled", "NaN"])):
        engine = engine_of(
            with_eos(folder, tmp_path / str(len(events))), batch_size=2, block_size=4, max_batched_tokens=2
        )
        alone = [complete(engine, [prompt], replace(decode, prefix_cache=False))[0] for prompt in prompts]
        ahead = look_ahead(engine)
        scheduler, num_reused = engine.scheduler, 0
        for event, num_steps in product(events, range(1, 24)):
            salted = replace(decode, cache_salt=f"{event} {num_steps}")
            first, *others = (engine.add(engine.request(i, prompt, salted)) for i, prompt in enumerate(prompts))
            for _ in range(num_steps):
                engine.step()
            ends_well = not first.sequences or event == "preempted"
            if first.sequences:
                row = first.sequences[0]
                slot, is_last = row.state_slots[-1], row.num_output_tokens == decode.max_new_tokens - 1
                ends_well |= event == "NaN" and is_last and decode is DRAWN  # its last step is computed already
                ROW_EVENTS[event](engine, first)
            while any(group.sequences for group in (first, *others)):
                engine.step()
                scheduler.check_integrity()
                num_reused += event != "preempted" and any(slot in s.state_slots for s in others[1].sequences)
            with noted((event, num_steps)):
                assert [group.completions[0] for group in others] == alone[1:]
                assert first.completions == ({0: alone[0]} if ends_well else {})
                assert (first.error is not None) == (event == "NaN" and not ends_well)
                assert scheduler.state_manager.num_free_slots == scheduler.state_manager.num_slots
                assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
        assert ends_well  # after the last number of steps
        assert num_reused
        assert any(ahead) == (decode == DRAWN)
        for number, token in enumerate(alone[0].token_ids):
            stopped = complete(engine, prompts, replace(decode, stop_token_ids=[token], cache_salt=f"stop {number}"))
            end = alone[0].token_ids.index(token) + 1
            assert stopped[0].token_ids == alone[0].token_ids[:end]
            assert all(
                row.token_ids == lone.token_ids[: len(row.token_ids)] for row, lone in zip(stopped, alone, strict=True)
            )


def answers(engine: Engine, fresh: Engine, *prompts: list[int]) -> tuple[list[int], list[int]]:
    """Return the first answer and each prompt's number of cached tokens. All answers equal those without a cache."""
    decode = DecodeConfig(max_new_tokens=13, ignore_eos=True, logprobs=20)
    outputs = list(engine.generate([engine.request(i, prompt, decode) for i, prompt in enumerate(prompts)]))
    outputs.sort(key=lambda output: output.request_id)
    expected = complete(fresh, list(prompts), replace(decode, prefix_cache=False))
    assert [output.completions[0] for output in outputs] == expected
    engine.scheduler.check_integrity()
    return expected[0].token_ids, [output.num_cached_tokens for output in outputs]


def test_prefixes_end_at_snapshots_and_have_the_bits_of_a_whole_prompt(
    folder: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that begin with a first turn, with a whole conversation, with its prompt alone, and with blocks of a text
    without turns; two of them in one step."""
    monkeypatch.setattr(snapshots, "MIN_TOKENS", 8)
    folder, made = with_eos(folder, tmp_path / "with eos"), with_eos(made, tmp_path / "export with eos")
    for dtype, model in (("float32", folder), ("bfloat16", folder), ("float32", made)):
        engine, fresh = (engine_of(copy, dtype, block_size=4) for copy in (model, folder))
        for state in engine.executor.cache.states:
            state.fill_(torch.nan)
        first = SYSTEM + QUESTIONS[0]
        answer, num_cached = answers(engine, fresh, first)
        assert num_cached == [0]
        # both from the end of the first turn, in one step
        assert answers(engine, fresh, SYSTEM + QUESTIONS[1], SYSTEM + QUESTIONS[2])[1] == [28, 28]
        at_output = 56 if engine.scheduler.state_manager.saves_outputs else 44
        assert answers(engine, fresh, first + answer + [EOS] + QUESTIONS[1])[1] == [at_output]
        without_reasoning = first + answer[5:] + [EOS] + QUESTIONS[1]
        assert answers(engine, fresh, without_reasoning)[1] == [44]
        texts = [[*range(5, 35), 40 + i, 41, 42] for i in range(3)]
        assert [answers(engine, fresh, text)[1] for text in texts] == [[0], [0], [28]]


def test_kept_prefixes_have_the_states_after_them(folder: Path, tmp_path: Path) -> None:
    """One prompt begins another one. Other numbers in the file give other log probabilities, so they are read."""
    run = run_config(folder)
    rows = [{"prompt_token_ids": prompt} for prompt in (BEGINNING, BEGINNING[:17])]
    assert keep(run, tmp_path / "kept", *rows)["num_kept_prompts"] == 2
    with safe_open(tmp_path / "kept", framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_tensors(tmp_path / "other", tensors | {"layers.0.state.0": -tensors["layers.0.state.0"]}, metadata)
    plain = load_engine(run, 3)
    for block_size in (16, 4):
        kept = {
            name: load_engine(
                replace(run, device=replace(run.device, kept_prefixes=[str(tmp_path / name)], block_size=block_size)), 3
            )
            for name in ("kept", "other")
        }
        for prompt, num_cached in (([*BEGINNING, 3], 32), ([*BEGINNING[:17], 3, 4], 16)):
            output, wrong, expected = (kept_prefixes.complete(e, prompt) for e in (*kept.values(), plain))
            assert output.completions == expected.completions
            assert output.num_cached_tokens == num_cached
            assert wrong.completions[0].logprobs != expected.completions[0].logprobs
    engine = kept["kept"]
    for number in range(engine.num_free_slots):
        engine.pin_state(b"%d" % number)
    assert kept_prefixes.complete(engine, BEGINNING).completions == kept_prefixes.complete(plain, BEGINNING).completions
    place_kept(engine, open_kept([str(tmp_path / "kept")], plan_of(run)))  # its states are pinned already
    full = load_engine(replace(run, device=replace(run.device, block_size=16)), 3)
    for number in range(full.num_free_slots):
        full.pin_state(b"%d" % number)
    with pytest.raises(
        UserError, match="needs a slot for the recurrent state of row 0, but none is free: raise device"
    ):
        place_kept(full, open_kept([str(tmp_path / "other")], plan_of(run)))


def test_drafts_change_nothing(folder: Path, made: Path) -> None:
    """The state includes accepted drafts alone, wherever a draft is wrong."""
    decode = DecodeConfig(max_new_tokens=19, ignore_eos=True, logprobs=3)
    drafts = replace(decode, speculate=Speculate.ngram, speculation=SpeculationConfig(adaptive=False, num_tokens=6))
    small_steps = {"block_size": 4, "max_batched_tokens": 9}
    for model, dtype, device in ((folder, "float32", {}), (folder, "bfloat16", small_steps), (made, "float32", {})):
        expected = complete(engine_of(folder, dtype, **device), SHORT, decode)
        known = {(i, 0): completion.token_ids for i, completion in enumerate(expected)}
        for right in (lambda _: True, lambda _: False, *(lambda at, wrong=n: at != wrong for n in range(6))):
            engine = engine_of(model, dtype, **device)
            engine.speculator.proposers[Speculate.ngram] = Hostile(known, right)
            assert complete(engine, SHORT, drafts) == expected
            assert engine.speculator.counts.num_drafted_tokens
            engine.scheduler.check_integrity()


def test_a_recurrent_model_drafts(folder: Path, tmp_path: Path, preempted: list[Any]) -> None:
    """For itself all drafts are right, whatever its state: new, after a preemption or in few slots. For another model
    they change nothing."""
    write_llama(tmp_path / "llama")
    decode = DecodeConfig(max_new_tokens=15, ignore_eos=True, logprobs=3)
    drafts = replace(decode, speculate=Speculate.model, speculation=SpeculationConfig(adaptive=False, num_tokens=3))
    forks = {"n": 2, "max_new_tokens": 9, "temperature": 1.1, "seed": 5}
    for model in (folder, tmp_path / "llama"):
        run = run_config(model)
        speculation = SpeculationConfig(model_path=str(folder))
        drafting = replace(run, decode=replace(run.decode, speculate=Speculate.model, speculation=speculation))
        for device in ({}, {"block_size": 4, "max_batched_tokens": 9}, {"block_size": 4}):
            engine, plain = (load_engine(replace(r, device=replace(r.device, **device)), 7) for r in (drafting, run))
            assert bool(plain.scheduler.state_manager.num_slots) == (model == folder)
            proposer: Any = engine.speculator.proposers[Speculate.model]
            for state in proposer.executor.cache.states:
                state.fill_(torch.nan)
            if device == {"block_size": 4}:  # few blocks, and fewer pairs of slots than rows
                manager = engine.scheduler.block_manager
                manager.pin(manager.allocate(manager.num_free_blocks - FEW_BLOCKS))
                engine.requests = replace(engine.requests, num_blocks=FEW_BLOCKS)
                del proposer._states._free[2:]
            for _ in range(2):
                with noted((model, device)):
                    assert complete(engine, PROMPTS, drafts) == complete(plain, PROMPTS, decode)
            counts = engine.speculator.counts
            assert counts.num_drafted_tokens
            assert model != folder or counts.num_accepted_tokens == counts.num_drafted_tokens
            sampled = [complete(e, SHORT, replace(d, **forks)) for e, d in ((engine, drafts), (plain, decode))]
            assert sampled[0] == sampled[1]
            engine.scheduler.check_integrity()
    assert preempted


@pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")
def test_ranks_have_the_bits_of_one_process(folder: Path, tmp_path: Path) -> None:
    """As threads, each variant of the architecture; as processes, requests that fork, draft and share prefixes."""
    name = json.loads((folder / "config.json").read_text())["model_type"]
    for number, variant in enumerate(HYBRID[name].variants):
        HYBRID[name].write(tmp_path / str(number), **variant)
        quant = QuantConfig(QuantScheme.int4, group_size=-1) if number == 1 else QuantConfig()
        run = replace(run_config(tmp_path / str(number)), quant=quant)
        _, costs = model_costs(run.model, run.quant, run.parallel, resolve_model(run.model), 16, packed=True)
        assert costs.stages(2) == stage_layers(plan_of(run).model, 2, torch.float32)  # as parallel=auto expects
        expected = whole_steps(run, SHORT)
        most = 2 if name == "qwen3_next" else 3  # its rows are in the order of the 2 key heads
        for tp, pp in ((most, 1), (1, 2), (2, 2)):
            for step, (first, *_) in zip(expected, zip(*stage_steps(run, tp, pp, SHORT), strict=True), strict=True):
                assert first.logits.equal(step.logits), (variant, tp, pp)
    drafts = {"speculate": Speculate.ngram, "max_new_tokens": 40}
    decodes = [DecodeConfig(max_new_tokens=9, **case) for case in ({"n": 3, "temperature": 1.1, "seed": 5}, {})]
    decodes += [DecodeConfig(num_beams=3, max_new_tokens=9), DecodeConfig(**drafts), DecodeConfig(**drafts)]
    expected = [divided_engines.answers(engine_of(folder), decode) for decode in decodes]
    for tp, pp in ((2, 1), (1, 2)):
        engine = load_engine(divided_engines.parallel(run_config(folder), tp, pp), 4)
        assert [divided_engines.answers(engine, decode) for decode in decodes] == expected
        groups = [engine.add(engine.request(i, prompt, decodes[1])) for i, prompt in enumerate(divided_engines.PROMPTS)]
        for _ in range(5):  # then an executor is replaced while steps are in flight, as by an adapter
            engine.step()
        engine.run_over(engine.executor.model, engine.executor.cache)
        assert [group.num_preemptions > 0 for group in groups].count(True) == (0 if pp == 1 else 2)
        while any(group.sequences for group in groups):
            engine.step()
        assert [group.completions for group in groups] == [{0: completions[0]} for completions, _ in expected[1]]
        divided_engines.close(engine)


def test_calibration_computes_each_sample_from_an_empty_state(folder: Path) -> None:
    """The scales of a static cache are the largest keys and values of whole prompts. Ranks choose the same codes."""
    run = run_config(folder)
    static = QuantConfig(kv_cache=KVCacheFormat.int8, kv_cache_scales=KVCacheScales.static)
    made = quantized_by(replace(run, quant=static), PROMPTS)
    steps, model = whole_steps(run, PROMPTS), plan_of(run).model
    attends = [number for number, layer in enumerate(model.layers) if model.attention_module(layer) is not None]
    for number, parts in zip(attends, zip(*(step.cached for step in steps), strict=True), strict=True):
        for part, name in enumerate(("k_scale", "v_scale")):
            stored = torch.cat([step[part] for step in parts])
            if not stored.numel():  # latent attention stores no values
                continue
            largest = stored.abs().amax((0, 2))
            scale = made.tensors[f"{model.layout.layers}.{number}.{model.layout.attention}.{name}"].flatten()
            torch.testing.assert_close(scale * 127, largest)
    for quant in ("int8 gptq", "a8w8 static smoothquant", "fp8 dynamic smoothquant, static cache"):
        changed = replace(run, quant=CALIBRATED[quant])
        made = quantized_by(changed, PROMPTS)
        scales = [name for name in made.tensors if "scale" in name]
        assert any(".in_proj" in name or ".0.self_attn.q_proj" in name for name in scales)
        assert not any(part in name for name in scales for part in (*FLOAT_GATES, *FLOAT_PARTS))
        for tp, pp in ((2, 1), (1, 2)):
            assert quantized_by(changed, PROMPTS, tp, pp) == made


def test_features_without_states_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    run = run_config(folder)
    engine = engine_of(folder)
    if not engine.executor.cache.tensors:  # a Mamba-2 without a context limit has more slots
        engine = engine_of(folder, kv_cache_memory=str(40 * slot_bytes(engine)))
    refused = "is not supported for a model with recurrent layers"
    write_paddle(tmp_path / "prefix.npy", 4, num_layers=4)
    prefixed = replace(run, model=replace(run.model, prefixes={"story": str(tmp_path / "prefix.npy")}))
    with pytest.raises(UserError, match=f"model.prefixes.story: a soft prefix {refused}: leave it out"):
        load_engine(prefixed, 1)
    tp, heads = MOST_RANKS.get(json.loads((folder / "config.json").read_text())["model_type"], (5, "4 query heads"))
    with pytest.raises(UserError, match=f"tp={tp} is more than the {heads} .*this model: give at most {tp - 1}"):
        rank_plan(run, ParallelLayout(tp), Threads.of(1)[0])
    with pytest.raises(UserError, match="the request has 21 sequences, which need 42 slots .*, but there are 40"):
        engine.request(0, [5], DecodeConfig(n=21, temperature=1.0, max_new_tokens=1))
    kept = replace(run, device=replace(run.device, kept_prefixes=["missing"]))
    with pytest.raises(UserError, match=f"device.kept_prefixes with ranks {refused}: give parallel=single"):
        load_engine(divided_engines.parallel(kept, 2), 1)
    small = replace(run, device=replace(run.device, kv_cache_memory="1000"))
    with pytest.raises(
        UserError,
        match=rf"=1000 does not fit: give from \d+ \(one block and 4 recurrent states of {slot_bytes(engine):,} bytes\)",
    ):
        load_engine(small, 1)
