"""Recorded steps, of decoding and of prompts, compared with the same steps computed each time."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conf.decoding import DecodeConfig
from kernels import build
from models.batch import Batch, BatchShape
from pipelines.engine import Engine, executor, recorded_steps
from pipelines.engine.recorded_steps import RecordedSteps
from pipelines.engine.steps import StepOutputs, Steps
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import complete, generate, run_config, write_llama
from tests.helpers.cases import each

pytestmark = pytest.mark.skipif(build.library() is None, reason="steps are recorded where the C++ kernels are")


def batch_of(context_lengths: list[int], num_blocks: int = 1) -> Batch:
    rows = list(range(len(context_lengths)))
    return Batch.of(
        token_ids=context_lengths,
        positions=[length - 1 for length in context_lengths],
        slots=rows,
        block_tables=[[row] * num_blocks for row in rows],
        query_starts=[*rows, len(rows)],
        context_lengths=context_lengths,
        prompt_lengths=[1 for _ in rows],
        prompt_features=[() for _ in rows],
        output_rows=rows,
        output_starts=[*rows, len(rows)],
    )


@pytest.fixture
def computed() -> list[tuple[int, ...]]:
    return []


@pytest.fixture
def doubles(computed: list[tuple[int, ...]]) -> Steps:
    """Return a model whose outputs are twice its context lengths. `computed` gets the shapes that were not replayed."""

    def compute(batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        computed.append(tuple(batch.block_tables.shape))
        return StepOutputs(batch.context_lengths * 2, batch.positions * 2, batch.token_ids * 2)

    return compute


def run(steps: RecordedSteps, batch: Batch) -> list[list[int]]:
    return [output.tolist() for output in steps(batch)]


@torch.inference_mode()
def test_each_shape_is_computed_once_and_recorded_when_it_comes_back(
    doubles: Steps, computed: list[tuple[int, ...]]
) -> None:
    steps = RecordedSteps(doubles, max_tokens=16, times_before=1)
    for lengths, num_blocks in ([5], 1), ([5, 6], 1), ([7], 1), ([9], 3), ([2, 3], 1), ([8], 4), ([4], 1), ([1, 2], 1):
        doubled = [2 * length for length in lengths]
        expected = [doubled, [length - 2 for length in doubled], doubled]
        assert run(steps, batch_of(lengths, num_blocks)) == expected
    # 3 blocks fit a table of 4; recording also computes
    assert computed == [(1, 1), (2, 1), (1, 1), (1, 4), (2, 1), (1, 4)]
    assert [shape.num_sequences for shape in steps.shapes] == [1, 1, 2]  # the most recent is last


@torch.inference_mode()
def test_tokens_that_the_caller_gives_take_the_place_of_the_batchs(doubles: Steps) -> None:
    steps = RecordedSteps(doubles, max_tokens=16, times_before=0)
    for tokens in [3, 4], [5, 6], [7, 8]:
        assert steps(batch_of([1, 1]), torch.tensor(tokens)).finite.tolist() == [2 * token for token in tokens]


@torch.inference_mode()
def test_the_shapes_used_last_are_kept_within_their_bytes(doubles: Steps, computed: list[tuple[int, ...]]) -> None:
    """A step of this model has three results of 8 bytes per row."""
    steps = RecordedSteps(doubles, max_tokens=16, times_before=0, max_bytes=24 * (1 + 3 + 4 + 5))
    for size in (1, 2, 3, 4, 1, 5):  # 15 rows: 2 is dropped
        run(steps, batch_of([1] * size))
    assert [shape.num_sequences for shape in steps.shapes] == [3, 4, 1, 5]
    computed.clear()
    for size in (3, 4, 5, 1):
        run(steps, batch_of([1] * size))
    assert computed == []
    run(steps, batch_of([1] * 2))
    assert computed == [(2, 1)]
    run(steps, batch_of([1] * 16))  # more than all the bytes, but the newest stays
    assert [shape.num_sequences for shape in steps.shapes] == [16]
    assert run(steps, batch_of([4] * 16))[0] == [8] * 16
    assert computed == [(2, 1), (16, 1)]


@torch.inference_mode()
def test_a_shape_is_counted_among_those_that_came_last(
    doubles: Steps, computed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_steps, "MAX_COUNTED_SHAPES", 2)
    steps = RecordedSteps(doubles, max_tokens=16, times_before=2)
    for size in (2, 2, 1, 3, 4, 2, 2, 2, 2):  # the first two are dropped when 4 comes
        run(steps, batch_of([1] * size))
    assert computed == [(size, 1) for size in (2, 2, 1, 3, 4, 2, 2, 2)]


@torch.inference_mode()
def test_large_steps_are_computed_each_time(doubles: Steps, computed: list[tuple[int, ...]]) -> None:
    steps = RecordedSteps(doubles, max_tokens=16, times_before=0)
    for _ in range(2):
        run(steps, batch_of([1] * 17))
    assert computed == [(17, 1)] * 2


@torch.inference_mode()
def test_a_step_that_cannot_be_recorded_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    capture = recorded_steps.capture
    monkeypatch.setattr(recorded_steps, "capture", lambda compute: tried.append(1) or capture(compute))
    steps = RecordedSteps(lambda batch, _: StepOutputs(*(batch.context_lengths.sort().values,) * 3), 16, 0)
    for lengths in ([3, 1], [5, 2], [7]):
        assert run(steps, batch_of(lengths))[0] == sorted(lengths)
    assert tried == [1]
    assert not steps.can_record


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """Return a function that makes engines with the given fields of `device`."""
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)

    def make(**device: int) -> Engine:
        run = run_config(folder)
        return load_engine(replace(run, device=replace(run.device, **device)), 4)

    return make


def test_an_engine_gives_the_same_bits_with_recorded_steps(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows that end one after the other, and tables that grow from one block to many."""
    decode = DecodeConfig(logprobs=5, ignore_eos=True, prefix_cache=False)
    prompts = [list(range(3, 3 + 7 * n)) for n in range(1, 5)]

    def results(engine: Engine) -> list[object]:
        lengths = (9, 40, 3, 25)
        requests = [
            engine.request(i, prompt, DecodeConfig(**{**vars(decode), "max_new_tokens": length}))
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        outputs = sorted(engine.generate(requests), key=lambda output: output.request_id)
        return [(o.completions[0].token_ids, o.completions[0].logprobs) for o in outputs]

    recorded = engine_of()
    first = results(recorded)
    assert recorded.executor.decode_steps.shapes  # type: ignore[attr-defined]
    monkeypatch.setattr(recorded_steps, "capture", lambda compute: (None, compute()))
    assert results(engine_of()) == first


PROMPTS = [list(range(3 + i, 24 + i)) for i in range(5)]  # one shape, or chunks of a few
EVERYTHING = DecodeConfig(max_new_tokens=3, logprobs=5, ignore_eos=True, prefix_cache=False)


@each("max_batched_tokens, prompt_logprobs", [(2048, None), (2048, 2), (7, None), (7, 2)])
def test_a_replayed_prompt_has_the_bits_of_a_computed_one(
    engine_of: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    max_batched_tokens: int,
    prompt_logprobs: int | None,
) -> None:
    """Tokens that are all outputs form a decode step, which is recorded up to 16 tokens."""
    decode = replace(EVERYTHING, prompt_logprobs=prompt_logprobs)

    def results(prompts_before_recording: int) -> tuple[Engine, list[object]]:
        monkeypatch.setattr(executor, "PROMPTS_BEFORE_RECORDING", prompts_before_recording)
        engine = engine_of(max_batched_tokens=max_batched_tokens)
        outputs = [generate(engine, [prompt], decode)[0] for prompt in PROMPTS]
        return engine, [(output.completions, output.prompt_logprobs) for output in outputs]

    computed_each_time, expected = results(100)
    recorded, got = results(1)
    assert got == expected
    in_decode_steps = [shape.num_tokens for shape in recorded.executor.decode_steps.shapes]  # type: ignore[attr-defined]
    assert bool(recorded_shapes(recorded)) == (prompt_logprobs is None)
    assert (7 in in_decode_steps) == (prompt_logprobs is not None and max_batched_tokens == 7)
    assert not recorded_shapes(computed_each_time)


def test_prompts_over_the_limit_are_computed_each_time(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit applies to the weights' bytes times the tokens."""
    monkeypatch.setattr(executor, "PROMPTS_BEFORE_RECORDING", 1)
    weight_bytes = int(engine_of().executor.step_weight_bytes(1))
    for num_tokens, recorded in (len(PROMPTS[0]), [len(PROMPTS[0])]), (len(PROMPTS[0]) - 1, []):
        monkeypatch.setattr(executor, "MAX_RECORDED_BYTES", weight_bytes * num_tokens)
        engine = engine_of()
        for prompt in PROMPTS:
            complete(engine, [prompt], EVERYTHING)
        assert [shape.num_tokens for shape in recorded_shapes(engine)] == recorded


def recorded_shapes(engine: Engine) -> list[BatchShape]:
    steps = engine.executor.prompt_steps
    assert isinstance(steps, RecordedSteps)
    return steps.shapes


def test_damaged_weights_are_found_in_a_replayed_step(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    group = engine.add(engine.request(0, [3, 4, 5], DecodeConfig(max_new_tokens=8, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    norm = engine.executor.model.get_submodule("model.norm")
    norm.weight.data.fill_(torch.inf)  # type: ignore[union-attr, operator]
    engine.step()
    assert not group.sequences
    assert "the model's logits are not finite: the weights are damaged" in str(group.output().error)
    assert complete(engine_of(), [[3, 4, 5]], DecodeConfig(max_new_tokens=8, ignore_eos=True))


def test_decode_steps_may_have_threads_of_their_own(engine_of: Callable[..., Engine]) -> None:
    library = build.library()
    assert library is not None
    before, seen = library.get_threads(), []
    engine = engine_of(decode_threads=1, threads=2)
    for name in ("forward", "logits"):  # a replayed step calls neither
        function = getattr(engine.executor.model, name)
        setattr(
            engine.executor.model, name, lambda *args, f=function: (seen.append(library.get_threads()), f(*args))[1]
        )
    try:
        complete(engine, [[3, 4, 5]], DecodeConfig(max_new_tokens=5, ignore_eos=True))
        assert seen == [2, 2, 1, 1, 1, 1]  # a decode step is computed, recorded, replayed twice
        assert library.get_threads() == 2
    finally:
        library.set_threads(before)
