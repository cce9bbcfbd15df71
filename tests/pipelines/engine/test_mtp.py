"""Drafts of DeepSeek-V3's multi-token prediction layer: equal to its definition in float64, and they change no
token."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import DeviceConfig, DeviceType, DType, RunConfig, Weights
from conf.speculation import Speculate, SpeculationConfig
from models.batch import Batch, KVCache
from pipelines.engine import Engine
from pipelines.engine.batch import NewTokens, flat_batch
from pipelines.engine.proposers.mtp import MtpProposer
from pipelines.engine.request import Sequence, SequenceGroup
from pipelines.loading.load_engine import load_engine
from tests.helpers.adapters import change_adapter, write_adapter
from tests.helpers.builders import engine_of, generate, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.deepseek import V3_GROUPS, YARN, NextTokenReference, build, change_config
from tests.helpers.drafts import DRAWN, GREEDY, PROMPTS, SETTINGS, devices
from tests.helpers.gguf_families import write_family as write_gguf_family
from tests.helpers.tiers import tiers

LATENT_BYTES = 4 * (24 + 8) * 4  # per token: layers including the MTP layer, channels, float32
DEVICES = devices(24 * 4 * LATENT_BYTES)
DRAFTED = SpeculationConfig(adaptive=False, num_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    # Whole vectors of 64: torch's loop over elements uses other arithmetic for a remainder.
    NextTokenReference(folder, intermediate_size=64, moe_intermediate_size=64, n_routed_experts=64)
    return folder


def mtp_run(folder: Path, **device: Any) -> RunConfig:
    run = run_config(folder)
    decode = replace(run.decode, speculate=Speculate.mtp)
    return replace(run, decode=decode, device=DeviceConfig(DeviceType.cpu, **device))


def drafted(decode: DecodeConfig) -> DecodeConfig:
    return replace(decode, speculate=Speculate.mtp, speculation=DRAFTED)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Engine:
    """Return an engine without drafts."""
    return engine_of(folder)


@pytest.mark.long
@pytest.mark.parametrize("device", tiers(DEVICES, long=["chunks", "preemption"]))
def test_drafts_change_nothing(folder: Path, plain: Engine, device: str, preempted: list[SequenceGroup]) -> None:
    engine, num_drafted = load_engine(mtp_run(folder, **DEVICES[device]), 3), 0
    for setting in SETTINGS:
        decode = replace(SETTINGS[setting], cache_salt=setting)  # no setting finds blocks of another
        expected = [output.completions for output in generate(plain, PROMPTS, decode)]
        preempted.clear()
        for _ in range(2):  # the second time with the prefix cache
            assert [output.completions for output in generate(engine, PROMPTS, drafted(decode))] == expected
        assert engine.speculator.counts.num_drafted_tokens > num_drafted
        assert bool(preempted) == (device == "preemption")
        num_drafted = engine.speculator.counts.num_drafted_tokens


def watch_drafts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Record the sequences and their drafts of all later proposals."""
    proposer = engine.speculator.proposers[Speculate.mtp]
    assert isinstance(proposer, MtpProposer)
    propose, seen = proposer.propose, list[tuple[list[int], list[int]]]()

    def watched(wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        drafts = propose(wanted)
        seen.extend((list(sequence.token_ids), draft) for (sequence, _), draft in zip(wanted, drafts, strict=True))
        return drafts

    monkeypatch.setattr(proposer, "propose", watched)
    return seen


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ({}, "preemption"),
        pytest.param({"rope_parameters": YARN}, "chunks", marks=pytest.mark.long),
        pytest.param({"first_k_dense_replace": 4}, "roomy", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_drafts_match_the_definition(
    tmp_path: Path, config: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = NextTokenReference(tmp_path, **config)
    for model in (tmp_path, write_gguf_family(tmp_path, tmp_path / "twin.gguf")):
        engine = load_engine(mtp_run(model, **DEVICES[device]), 3)
        seen = watch_drafts(engine, monkeypatch)
        generate(engine, PROMPTS, drafted(GREEDY))
        drafts = [(token_ids, draft) for token_ids, draft in seen if draft]
        assert len(drafts) > 40
        for token_ids, draft in drafts:
            assert draft == reference.drafts(token_ids, len(draft))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("kimi_k2", {"rope_parameters": YARN}),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": None}),
    ],
)
def test_families_of_the_same_form_draft_as_it_does(
    tmp_path: Path, model_type: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi K2 and GLM-4.7-Flash have one group of experts. The latter may name its layers, but not the MTP layer."""
    rotary = {key: value for key, value in changes.items() if key == "rope_parameters"}
    reference = NextTokenReference(tmp_path, n_group=1, topk_group=1, routed_scaling_factor=1.8, **rotary)
    plain = [output.completions for output in generate(engine_of(tmp_path), PROMPTS, GREEDY)]
    change_config(tmp_path, model_type=model_type, **changes)
    engine = load_engine(mtp_run(tmp_path), 3)
    seen = watch_drafts(engine, monkeypatch)
    assert [output.completions for output in generate(engine, PROMPTS, drafted(GREEDY))] == plain
    drafts = [(token_ids, draft) for token_ids, draft in seen if draft]
    assert len(drafts) > 40
    for token_ids, draft in drafts:
        assert draft == reference.drafts(token_ids, len(draft))


@pytest.mark.parametrize("device", tiers([*DEVICES][:3], quick=["chunks"], long=[*DEVICES][:3]))
def test_waiting_hidden_states_are_computed_before_the_draft(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows draft in every eleventh step, others in between, after steps with rejected drafts or without drafts."""
    reference = NextTokenReference(tmp_path)
    engine = load_engine(mtp_run(tmp_path, **DEVICES[device]), 3)
    seen, steps = watch_drafts(engine, monkeypatch), itertools.count()

    def lengths(rows: list[Sequence], most: list[int], num_tokens: int) -> list[int]:
        step = next(steps)
        return [count if (step + 4 * row.request.id) % 11 == 0 else 0 for row, count in zip(rows, most, strict=True)]

    monkeypatch.setattr(engine.speculator._budget, "lengths", lengths)
    generate(engine, PROMPTS, drafted(replace(GREEDY, max_new_tokens=45)))
    drafts = [(token_ids, draft) for token_ids, draft in seen if draft]
    assert len(drafts) > 12
    for token_ids, draft in drafts:
        assert draft == reference.drafts(token_ids, len(draft))


@pytest.mark.long
@each("budget, most", [(2048, 32), (8, 8)])
def test_without_drafts_the_layer_computes_many_tokens_at_once(
    folder: Path, budget: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of 45 tokens without drafts: 16 of each at once, or as many as a step takes. The last tokens are never
    needed."""
    engine = load_engine(mtp_run(folder, max_batched_tokens=budget), 3)
    monkeypatch.setattr(engine.speculator._budget, "lengths", lambda rows, most, num_tokens: [0] * len(rows))
    model, sizes = engine.executor.model, list[int]()
    ahead = model.predict_ahead

    def counted(hidden: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        sizes.append(batch.shape.num_tokens)
        return ahead(hidden, batch, cache)

    monkeypatch.setattr(model, "predict_ahead", counted)
    generate(engine, [[3], [4]], drafted(replace(GREEDY, max_new_tokens=45)))
    assert sizes == [most] * (88 // most)


def test_hidden_states_match_the_definition(tmp_path: Path) -> None:
    reference = NextTokenReference(tmp_path)
    engine = load_engine(mtp_run(tmp_path), 1)
    token_ids = list(range(5, 60))
    behind = [*token_ids[1:], 3]
    hidden = reference.hidden(token_ids)
    expected = reference.ahead(hidden, behind)
    (sequence,) = engine.add(engine.request(0, token_ids, GREEDY)).sequences
    engine.scheduler.plan()
    batch = flat_batch([NewTokens(sequence, 0, behind, len(behind))], engine.block_size)
    predicted = engine.executor.model.predict_ahead(hidden.float(), batch, engine.executor.cache)
    # 1e-4: float32 sums in another order; normed values are of order 1
    torch.testing.assert_close(predicted.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.long
def test_quantised_models_draft_too(folder: Path) -> None:
    run = replace(mtp_run(folder), quant=QuantConfig(QuantScheme.int8, kv_cache=KVCacheFormat.int8))
    run = replace(run, model=replace(run.model, dtype=DType.bfloat16))
    engine = load_engine(run, 3)
    decode = replace(DRAWN, logprobs=2)
    expected = [output.completions for output in generate(engine, PROMPTS, decode)]
    assert [output.completions for output in generate(engine, PROMPTS, drafted(decode))] == expected
    assert engine.speculator.counts.num_drafted_tokens > 0


@pytest.mark.long
def test_rows_that_do_not_draft_leave_no_rubbish_to_those_that_do(folder: Path, plain: Engine) -> None:
    expected = [output.completions for output in generate(plain, PROMPTS, GREEDY)]
    engine = load_engine(mtp_run(folder), 3)
    generate(engine, PROMPTS, GREEDY)
    assert [output.completions for output in generate(engine, PROMPTS, drafted(GREEDY))] == expected


@pytest.mark.long
def test_rows_with_adapters_of_the_head(folder: Path, tmp_path: Path) -> None:
    """The layer reads all hidden states of a prompt, and the head the last one, with the row's adapter."""
    names = ["q_b_proj", "lm_head"]
    adapter = write_adapter(tmp_path / "fr", folder, DeepseekV3ForCausalLM, r=4, target_modules=names)
    change_adapter(adapter, {}, {"base_model.model.lm_head.base_layer.weight": None})  # PEFT copies the adapted head
    run = mtp_run(folder)
    engine = load_engine(replace(run, model=replace(run.model, adapters={"fr": str(adapter)})), 3)

    def said(decode: DecodeConfig, names: list[str | None]) -> list[Any]:
        rows = [engine.request(i, prompt, decode, adapter=names[i % 2]) for i, prompt in enumerate(PROMPTS)]
        outputs = sorted(engine.generate(rows), key=lambda output: output.request_id)
        return [output.completions for output in outputs]

    decode = replace(GREEDY, logprobs=2)
    expected = said(decode, ["fr", None])
    assert said(drafted(decode), ["fr", None]) == expected
    assert [a == b for a, b in zip(said(decode, [None, None]), expected, strict=True)] == [False, True] * 3


@pytest.mark.long
def test_the_layer_is_loaded_only_where_it_is_asked_for(folder: Path, plain: Engine) -> None:
    ahead = load_engine(mtp_run(folder), 1).executor
    assert (len(plain.executor.cache.layers), len(ahead.cache.layers)) == (3, 4)
    assert plain.executor.weight_bytes < ahead.weight_bytes
    with pytest.raises(UserError, match=r"decode\.speculate=mtp"):
        plain.request(0, [5], drafted(GREEDY))


def test_random_weights_have_the_layer(folder: Path) -> None:
    run = mtp_run(folder)
    engine = load_engine(replace(run, model=replace(run.model, weights=Weights.random)), 2)
    expected = [output.completions for output in generate(engine, PROMPTS, GREEDY)]
    assert [output.completions for output in generate(engine, PROMPTS, drafted(GREEDY))] == expected


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    for name, count in (("no tensors", 1), ("none", 0)):
        build(3, **V3_GROUPS, num_nextn_predict_layers=count).save_pretrained(tmp_path / name)
    for name in ("llama", "no tensors", "none"):
        with pytest.raises(UserError, match=r"^decode\.speculate=mtp needs a layer that predicts further .* has none:"):
            load_engine(mtp_run(tmp_path / name), 1)
