"""A draft model: it changes no token, computes missing tokens only once, and if it equals the model all drafts are
accepted."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from conf.quantization import KVCacheFormat, QuantConfig
from conf.schema import DeviceConfig, DeviceType, DType, RunConfig
from conf.speculation import Speculate, SpeculationConfig
from models.batch import Batch
from pipelines.engine import Engine
from pipelines.engine.proposers.model import ModelProposer
from pipelines.engine.request import SequenceGroup
from pipelines.engine.steps import StepOutputs
from pipelines.loading.load_engine import load_engine
from tests.helpers.adapters import write_adapter
from tests.helpers.builders import KEY_VALUE_BYTES, engine_of, generate, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.drafts import DRAWN, GREEDY, PROMPTS, SETTINGS, devices
from tests.helpers.soft_prefixes import write_paddle
from tests.helpers.tiers import in_turn, tiers

DRAFTED = SpeculationConfig(adaptive=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with other weights and sizes: a quarter of the keys and values."""
    folder = tmp_path_factory.mktemp("smaller")
    write_llama(folder, hidden_size=32, num_hidden_layers=1, num_key_value_heads=1, num_attention_heads=2)
    return folder


def drafting_run(folder: Path, draft: Path | None, **device: Any) -> RunConfig:
    run = run_config(folder)
    speculation = SpeculationConfig(model_path=None if draft is None else str(draft))
    decode = replace(run.decode, speculate=Speculate.model, speculation=speculation)
    return replace(run, decode=decode, device=DeviceConfig(DeviceType.cpu, **device))


def drafting_engine(folder: Path, draft: Path, **device: Any) -> Engine:
    return load_engine(drafting_run(folder, draft, **device), 3)


def drafted(decode: DecodeConfig) -> DecodeConfig:
    return replace(decode, speculate=Speculate.model, speculation=DRAFTED)


def devices_of(same: bool) -> dict[str, dict[str, Any]]:
    """A block contains the keys and values of both models: twice as many bytes, or a quarter more."""
    return devices(24 * 4 * KEY_VALUE_BYTES * (8 if same else 5) // 4)


def proposer_of(engine: Engine) -> ModelProposer:
    proposer = engine.speculator.proposers[Speculate.model]
    assert isinstance(proposer, ModelProposer)
    return proposer


PLACES = devices_of(same=True)
CHOSEN = [
    (setting, place, same)
    for same, first in ((True, 0), (False, 2))
    for setting, place in in_turn(SETTINGS, PLACES, first=first)
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "device", "same"), tiers(itertools.product(SETTINGS, PLACES, (True, False)), CHOSEN[::3], CHOSEN)
)
def test_drafts_change_nothing(
    folder: Path, smaller: Path, setting: str, device: str, same: bool, preempted: list[SequenceGroup]
) -> None:
    decode = SETTINGS[setting]
    expected = [output.completions for output in generate(engine_of(folder), PROMPTS, decode)]
    engine = drafting_engine(folder, folder if same else smaller, **devices_of(same)[device])
    preempted.clear()
    for _ in range(2):  # the second time with the prefix cache
        assert [output.completions for output in generate(engine, PROMPTS, drafted(decode))] == expected
    counts = engine.speculator.counts
    assert counts.num_drafted_tokens > 0
    if same and not decode.temperature:
        assert counts.num_accepted_tokens == counts.num_drafted_tokens
    assert bool(preempted) == (device == "preemption")


@each("kv_cache, dtype", in_turn(["none", "int8", "int4", "fp8"], ["float32", "bfloat16"]))
def test_drafts_of_the_model_itself_stay_in_every_format_of_the_cache(folder: Path, kv_cache: str, dtype: str) -> None:
    run = drafting_run(folder, folder)
    run = replace(
        run, model=replace(run.model, dtype=DType[dtype]), quant=QuantConfig(kv_cache=KVCacheFormat[kv_cache])
    )
    engine = load_engine(run, 3)
    plain = generate(engine, PROMPTS, replace(GREEDY, logprobs=2))
    again = generate(engine, PROMPTS, drafted(replace(GREEDY, logprobs=2)))
    assert [output.completions for output in again] == [output.completions for output in plain]
    assert engine.speculator.counts.num_accepted_tokens == engine.speculator.counts.num_drafted_tokens > 0


@pytest.mark.long
def test_equals_assisted_generation(folder: Path, smaller: Path) -> None:
    models = [LlamaForCausalLM.from_pretrained(path) for path in (folder, smaller)]
    engine = drafting_engine(folder, smaller)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = models[0].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=models[1],
            max_new_tokens=23,
            do_sample=False,
            pad_token_id=0,
        )
        (self_drafted,) = generate(engine, [prompt], drafted(GREEDY))
        assert self_drafted.completions[0].token_ids == output[0, len(prompt) :].tolist()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], list[int]]:
    """Return a function that returns the token counts of the draft model's batches from now on."""

    def watch(engine: Engine) -> list[int]:
        executor, sizes = proposer_of(engine).executor, list[int]()
        execute = executor.execute

        def counted(batch: Batch, token_ids: torch.Tensor | None = None) -> StepOutputs:
            sizes.append(batch.shape.num_tokens)
            return execute(batch, token_ids)

        monkeypatch.setattr(executor, "execute", counted)
        return sizes

    return watch


def test_cached_tokens_are_not_computed_again(folder: Path, computed: Callable[[Engine], list[int]]) -> None:
    engine = drafting_engine(folder, folder, block_size=4)
    sizes = computed(engine)
    prompt = list(range(3, 33))
    generate(engine, [prompt], drafted(GREEDY))
    # The prompt and its first token; then single drafts. The last draft of a step is computed after it was accepted.
    assert sizes[0] == 31
    assert sum(sizes[1:]) <= 23
    sizes.clear()
    generate(engine, [prompt], drafted(GREEDY))
    assert sizes[0] == 31 - 28  # seven full blocks are from the first time
    sizes.clear()
    generate(engine, [prompt], drafted(replace(GREEDY, prefix_cache=False)))
    assert sizes[0] == 31


def test_keys_that_a_plain_row_overwrote_are_computed_again(folder: Path) -> None:
    engine = drafting_engine(folder, folder, block_size=4, kv_cache_memory=str(40 * 4 * 2 * KEY_VALUE_BYTES))
    prompts = [list(range(3, 33)), list(range(40, 64))]
    for prompt in (prompts[0], prompts[1], prompts[0]):
        generate(engine, [prompt], drafted(GREEDY))
        generate(engine, [list(range(60, 90)), list(range(20, 70))], GREEDY)  # into all the blocks
        generate(engine, [prompt], GREEDY)  # only the model has filled these blocks
    assert engine.speculator.counts.num_accepted_tokens == engine.speculator.counts.num_drafted_tokens > 0


def test_a_long_prompt_is_computed_in_parts_that_no_step_waits_long_for(
    folder: Path, computed: Callable[[Engine], list[int]]
) -> None:
    engine = drafting_engine(folder, folder, max_batched_tokens=16)
    sizes = computed(engine)
    prompts = [list(range(3, 63)), list(range(20, 70))]
    outputs = generate(engine, prompts, drafted(GREEDY))
    assert max(sizes) <= 16
    assert [output.completions for output in outputs] == [
        output.completions for output in generate(engine_of(folder), prompts, GREEDY)
    ]
    assert engine.speculator.counts.num_accepted_tokens == engine.speculator.counts.num_drafted_tokens > 0


def test_infinite_logits_of_a_draft_model_are_not_an_error(folder: Path, smaller: Path) -> None:
    engine = drafting_engine(folder, smaller)
    model = proposer_of(engine).executor.model
    norm: Any = model.final_norm
    norm.weight = torch.nn.Parameter(torch.full_like(norm.weight, torch.nan), requires_grad=False)
    for decode in (GREEDY, DRAWN):
        expected = generate(engine_of(folder), PROMPTS, decode)
        outputs = generate(engine, PROMPTS, drafted(decode))
        assert [output.completions for output in outputs] == [output.completions for output in expected]


def test_a_block_is_counted_with_both_models_keys_and_values(folder: Path, smaller: Path) -> None:
    memory = str(60 * 16 * KEY_VALUE_BYTES)
    assert engine_of(folder, kv_cache_memory=memory).num_blocks == 60
    engine = drafting_engine(folder, smaller, kv_cache_memory=memory)
    assert engine.num_blocks == 48  # a block of the smaller model has a quarter of the bytes
    assert proposer_of(engine).executor.cache.tensors[0].shape[:2] == engine.executor.cache.tensors[0].shape[:2]


@pytest.mark.parametrize("device", ["roomy", "chunks"])
def test_rows_behind_soft_prefixes_and_with_adapters(folder: Path, tmp_path: Path, device: str) -> None:
    """The draft model uses neither, which reduces acceptance and changes no token."""
    write_paddle(tmp_path / "pre_caches.npy", 7)
    write_adapter(tmp_path / "fr", folder, LlamaForCausalLM, r=4, target_modules=["q_proj", "down_proj"])
    run = drafting_run(folder, folder, **devices_of(same=True)[device])
    prefixes, adapters = {"story": str(tmp_path / "pre_caches.npy")}, {"fr": str(tmp_path / "fr")}
    engine = load_engine(replace(run, model=replace(run.model, prefixes=prefixes, adapters=adapters)), 6)

    def said(decode: DecodeConfig) -> list[Any]:
        rows = [
            engine.request(i, prompt, decode, prefix=(None, "story", None)[i % 3], adapter=(None, None, "fr")[i % 3])
            for i, prompt in enumerate(PROMPTS)
        ]
        outputs = list(engine.generate(rows, on_step=engine.scheduler.check_integrity))
        return [output.completions for output in sorted(outputs, key=lambda output: output.request_id)]

    for decode in (replace(GREEDY, logprobs=2), DRAWN):
        expected = said(decode)
        assert said(drafted(decode)) == expected
    assert engine.speculator.counts.num_drafted_tokens > 0
