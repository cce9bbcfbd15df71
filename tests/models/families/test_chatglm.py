"""ChatGLM-6B: positions, masks, and an engine that does not split prompts. test_goldens.py compares plain prompts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import DType
from models.config import ConfigReader
from models.families.chatglm import ChatGLM, positions_2d, read_config
from pipelines.engine import Engine
from pipelines.engine.batch import build_batch
from pipelines.engine.scheduler import StepPlan
from tests.helpers.builders import all_logits, complete, engine_of, generate, run_config, unpacked_engine
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS, TOLERANCE, greedy, link

MASK, GMASK, SOP = 280, 281, 284
KEY_VALUE_BYTES = 2 * 2 * 64 * 4  # per token: K and V, layers, channels, float32
PROMPTS = [
    [*range(5, 20), GMASK, SOP],
    [30, GMASK, SOP],
    [*range(40, 49), MASK, 50, SOP, 60, 61, 62],
    [GMASK, SOP],
    [*range(5, 20), GMASK, SOP],
    [70, GMASK, 71, SOP, *range(80, 100)],
]
SMALL = {"block_size": 4, "kv_cache_memory": str(14 * 4 * KEY_VALUE_BYTES)}  # for about two of the prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link("chatglm", tmp_path_factory.mktemp("chatglm"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return engine_of(folder, batch_size=6)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDENS / "chatglm" / "golden.safetensors")


def observe_plans(engine: Engine) -> list[StepPlan]:
    """Record the plans of all later steps, and check that none splits a prompt."""
    plans: list[StepPlan] = []
    make_plan = engine.scheduler.plan

    def plan(*arguments: Any) -> StepPlan:
        plans.append(make_plan(*arguments))
        for item in plans[-1].scheduled:
            assert item.num_new_tokens == item.sequence.num_uncomputed_tokens
        return plans[-1]

    engine.scheduler.plan = plan  # type: ignore[method-assign,assignment]
    return plans


@torch.inference_mode()
def hidden_states(engine: Engine, tokens: list[int]) -> Tensor:
    """Return hidden states [T, E] of a prompt, from one prefill in which every token is an output."""
    group = engine.add(engine.request(0, tokens, DecodeConfig(max_new_tokens=1, penalty_alpha=0.5, top_k=2)))
    hidden = engine.executor.execute(build_batch(engine.scheduler.plan(), engine.block_size)).hidden
    engine.scheduler.cancel(group)
    return hidden


# The model


@each("sort", ["", "mid_", "mask_"])
def test_logits_and_positions(engine: Engine, golden: dict[str, Tensor], sort: str) -> None:
    prompt = golden[f"{sort}input_ids"][0].tolist()
    torch.testing.assert_close(all_logits(engine, prompt), golden[f"{sort}logits"][0], atol=TOLERANCE, rtol=0)
    group = engine.add(engine.request(0, prompt, DecodeConfig(max_new_tokens=1)))
    batch = build_batch(engine.scheduler.plan(), engine.block_size)
    engine.scheduler.cancel(group)
    assert torch.stack(positions_2d(batch)).equal(golden[f"{sort}position_ids"][0])


def test_positions_in_a_batch(engine: Engine, golden: dict[str, Tensor]) -> None:
    masks = golden["batch_attention_mask"].bool()
    groups = [
        engine.add(engine.request(i, ids[mask].tolist(), DecodeConfig(max_new_tokens=1)))
        for i, (ids, mask) in enumerate(zip(golden["batch_input_ids"], masks, strict=True))
    ]
    batch = build_batch(engine.scheduler.plan(), engine.block_size)
    for group in groups:
        engine.scheduler.cancel(group)
    expected = [positions[:, mask] for positions, mask in zip(golden["batch_position_ids"], masks, strict=True)]
    assert torch.stack(positions_2d(batch)).equal(torch.cat(expected, dim=1))


def test_scale_and_frequencies_are_the_published_ones(tmp_path: Path) -> None:
    for family in ("chatglm", "chatglm_28layers"):
        golden = load_file(GOLDENS / family / "golden.safetensors")
        (tmp_path / family).mkdir()
        logits = all_logits(engine_of(link(family, tmp_path / family)), golden["input_ids"][0].tolist())
        difference = (logits - golden["logits"][0]).abs().max()
        exact = (logits - golden["logits_exact_inv_freq"][0]).abs().max()
        assert exact > 3 * difference  # at least 5e-6, while rounding is 1e-6
        other_scale = (logits - golden["logits_alpha_from_config"][0]).abs().max()
        assert (other_scale > 1) == (family == "chatglm")  # the published code always scales by 28 layers


def test_large_scores_fit_in_float16(folder: Path, golden: dict[str, Tensor]) -> None:
    run = run_config(folder)
    logits = []
    for dtype in (DType.float16, DType.float32):
        engine = unpacked_engine(replace(run, model=replace(run.model, dtype=dtype)), 1)
        for name, parameter in engine.executor.model.named_parameters():
            if "query_key_value" in name:
                parameter.unflatten(0, (4, 3, 16))[:, :2].mul_(100)  # products of queries and keys are above 65504
        logits.append(all_logits(engine, golden["input_ids"][0].tolist()).float())
    # 0.01: float16 has 11 bits and logits are up to 3.5; every softmax has one token, so scores add no error
    torch.testing.assert_close(*logits, atol=0.01, rtol=0)


def test_a_reply_that_has_begun_continues_the_same(engine: Engine, golden: dict[str, Tensor]) -> None:
    prompt, ids = golden["input_ids"][0].tolist(), golden["greedy_ids"][0].tolist()
    for begun in (1, 7, 23):
        assert greedy(engine, [prompt + ids[:begun]], 24 - begun) == [ids[begun:]]


def test_marks_of_a_prompt(engine: Engine) -> None:
    model = engine.executor.model
    assert isinstance(model, ChatGLM)
    assert model.prompt_features([9, 9, GMASK, SOP]) == (3, 2)
    assert model.prompt_features([MASK, 9, GMASK, SOP, SOP, GMASK]) == (3, 2)
    assert model.prompt_features([9, MASK, 9, MASK, SOP, 9]) == (4, 1)
    assert model.prompt_features([SOP, 9, GMASK]) == (0, 2)


@each("prompt", [[9], [9, GMASK], [9, MASK, 9], [9, SOP]])
def test_a_prompt_without_its_marks_is_refused(engine: Engine, prompt: list[int]) -> None:
    message = (
        r"^the prompt lacks <sop> \(id 284\), or \[gMASK\] and \[MASK\] \(ids 281 and 280\): .* text, \[gMASK\], <sop>$"
    )
    with pytest.raises(UserError, match=message):
        engine.request(0, prompt, DecodeConfig())


CONFIG = {
    "model_type": "chatglm",
    "hidden_size": 32,
    "inner_hidden_size": 48,
    "num_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "bos_token_id": 5,
    "mask_token_id": 3,
    "gmask_token_id": 4,
}


@each(
    "changes, message",
    [
        ({"position_encoding_2d": False}, r"position_encoding_2d=False is not supported: only True"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings=True is not supported"),
        ({"pre_seq_len": 128}, r"pre_seq_len=128 is not supported"),
        ({"quantization_bit": 4}, r"quantization_bit=4 is not supported"),
        ({"hidden_size": 24}, r"hidden_size=24 is not a multiple of 4 \* num_attention_heads=16"),
        ({"bos_token_id": None}, r"bos_token_id is missing"),
        ({"gmask_token_id": None}, r"gmask_token_id is missing"),
        ({"mask_token_id": "3"}, r"mask_token_id='3' is not of type int"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(ConfigReader(CONFIG | changes, "config.json"))


# The engine


@each("family", ["chatglm", "chatglm_28layers"])
def test_a_step_too_small_for_the_prompt_is_refused(family: str, tmp_path: Path) -> None:
    prompt = load_file(GOLDENS / family / "golden.safetensors")["input_ids"][0].tolist()
    small = engine_of(link(family, tmp_path), max_batched_tokens=5)
    message = r"prompt and new tokens are 41, but this model's prompts cannot be computed in chunks and device\.max_batched_tokens=5"
    with pytest.raises(UserError, match=message):
        small.request(0, prompt, DecodeConfig(max_new_tokens=24))


@each(
    "device",
    [
        {"max_batched_tokens": 44},
        {"max_batched_tokens": 60, "block_size": 1},
        {"max_batched_tokens": 44, **SMALL},
        SMALL,
    ],
    quick=[SMALL],
)
def test_whole_prompts_in_small_steps_and_pools_change_no_token(
    engine: Engine, folder: Path, device: dict[str, Any]
) -> None:
    expected = [greedy(engine, [prompt], 20)[0] for prompt in PROMPTS]
    assert greedy(engine, PROMPTS, 20) == expected
    assert sum(map(len, PROMPTS)) > 60
    other = engine_of(folder, batch_size=6, **device)
    plans = observe_plans(other)
    for _ in range(2):
        outputs = generate(other, PROMPTS, DecodeConfig(max_new_tokens=20, ignore_eos=True))
        assert [output.completions[0].token_ids for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [0] * len(
            PROMPTS
        )  # including prompts that were seen before
    admissions = sum(item.num_new_tokens > 1 for plan in plans for item in plan.scheduled)
    assert (admissions > 2 * len(PROMPTS)) == ("kv_cache_memory" in device)  # preempted rows are computed again
    assert (
        max(sum(item.num_new_tokens for item in plan.scheduled) for plan in plans) <= other.scheduler.max_batched_tokens
    )


@each(
    "decode",
    [
        {"num_beams": 3},
        {"penalty_alpha": 0.6, "top_k": 3},
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"prompt_logprobs": 0},
    ],
    quick=[{"num_beams": 3}],
)
def test_other_ways_to_choose_are_the_same_in_small_steps_and_pools(
    engine: Engine, folder: Path, decode: dict[str, Any]
) -> None:
    config = DecodeConfig(max_new_tokens=10, ignore_eos=True, **decode)
    expected = [generate(engine, [prompt], config)[0] for prompt in PROMPTS]
    for device in ({"max_batched_tokens": 44}, SMALL | {"kv_cache_memory": str(24 * 4 * KEY_VALUE_BYTES)}):
        other = engine_of(folder, batch_size=3, **device)
        observe_plans(other)
        outputs = generate(other, PROMPTS, config)
        tokens = [[completion.token_ids for completion in output.completions] for output in outputs]
        assert tokens == [[completion.token_ids for completion in output.completions] for output in expected]


def test_beams_have_the_scores_of_whole_recomputed_sequences(engine: Engine) -> None:
    config = DecodeConfig(max_new_tokens=8, ignore_eos=True, num_beams=4, num_return_sequences=4)
    for prompt, output in zip(PROMPTS, generate(engine, PROMPTS, config), strict=True):
        assert len(output.completions) == 4
        for completion in output.completions:
            logits = all_logits(engine, prompt + completion.token_ids)[len(prompt) - 1 : -1].double()
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])
            assert completion.score == pytest.approx(logprobs.sum().item() / 8, abs=1e-4)  # float32 sums


def test_contrastive_search_equals_its_definition(engine: Engine) -> None:
    """Eq. 5 of arXiv 2202.06417 over whole recomputed sequences."""
    config = DecodeConfig(max_new_tokens=6, ignore_eos=True, penalty_alpha=0.6, top_k=4)
    for prompt, completion in zip(PROMPTS, complete(engine, PROMPTS, config), strict=True):
        tokens = list(prompt)
        for _ in range(6):
            probabilities, candidates = all_logits(engine, tokens)[-1].double().softmax(-1).topk(4)
            scores = []
            for probability, candidate in zip(probabilities, candidates.tolist(), strict=True):
                hidden = hidden_states(engine, [*tokens, candidate]).double()
                scores.append(0.4 * probability - 0.6 * torch.cosine_similarity(hidden[-1:], hidden[:-1]).max())
            tokens.append(int(candidates[torch.stack(scores).argmax()]))
        assert completion.token_ids == tokens[len(prompt) :]
