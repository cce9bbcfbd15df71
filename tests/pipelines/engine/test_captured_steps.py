"""Captured steps, of decoding and of prompts, against the same steps computed each time."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from conf.decoding import DecodeConfig
from kernels import build
from models.batch import Batch, BatchShape
from pipelines.engine import Engine, captured_steps, runner
from pipelines.engine.captured_steps import CapturedStep, CapturedSteps
from pipelines.loading import load_engine
from tests.helpers.builders import complete, generate, run_config, write_llama

pytestmark = pytest.mark.skipif(build.library() is None, reason="steps are captured where the C++ kernels are")


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
        prompt_marks=[() for _ in rows],
        output_rows=rows,
        output_starts=[*rows, len(rows)],
    )


@pytest.fixture
def computed() -> list[tuple[int, ...]]:
    return []


@pytest.fixture
def doubles(computed: list[tuple[int, ...]]) -> Callable[[Batch], captured_steps.Outputs]:
    """A model whose outputs are all twice its context lengths; `computed` gets the shapes that were not replayed."""

    def compute(batch: Batch) -> captured_steps.Outputs:
        computed.append(tuple(batch.block_tables.shape))
        return batch.context_lengths * 2, batch.positions * 2, batch.token_ids * 2

    return compute


@pytest.fixture
def steps(doubles: Callable[[Batch], captured_steps.Outputs]) -> CapturedSteps:
    return CapturedSteps(doubles, max_tokens=16)


def run(steps: CapturedSteps, batch: Batch) -> list[list[int]]:
    return [output.tolist() for output in steps.run(batch)]


@torch.inference_mode()
def test_each_shape_is_computed_once(steps: CapturedSteps, computed: list[tuple[int, ...]]) -> None:
    for lengths, num_blocks in ([5], 1), ([5, 6], 1), ([7], 1), ([9], 3), ([2, 3], 1), ([8], 4):
        doubled = [2 * length for length in lengths]
        expected = [doubled, [length - 2 for length in doubled], doubled]
        assert run(steps, batch_of(lengths, num_blocks)) == expected
    assert computed == [(1, 1), (2, 1), (1, 4)]  # 3 blocks have room in a table of 4


@torch.inference_mode()
def test_the_shapes_used_last_are_kept(steps: CapturedSteps, computed: list[tuple[int, ...]]) -> None:
    for size in (1, 2, 3, 4, 1, 5):  # 2 is the one to go
        run(steps, batch_of([1] * size))
    computed.clear()
    for size in (1, 3, 4, 5):
        run(steps, batch_of([1] * size))
    assert computed == []
    run(steps, batch_of([1] * 2))
    assert computed == [(2, 1)]


@torch.inference_mode()
def test_a_shape_is_captured_when_it_has_come_often(
    doubles: Callable[[Batch], captured_steps.Outputs], computed: list[tuple[int, ...]]
) -> None:
    """How often is counted while the shape is known."""
    steps = CapturedSteps(doubles, max_tokens=16, times_before=2)
    for length in range(1, 6):
        assert run(steps, batch_of([length]))[0] == [2 * length]
    assert computed == [(1, 1)] * 3
    for size in (2, 2, 3, 4, 5, 6, 2, 2, 2, 2):
        run(steps, batch_of([1] * size))
    assert computed[3:] == [(size, 1) for size in (2, 2, 3, 4, 5, 6, 2, 2, 2)]


@torch.inference_mode()
def test_large_steps_are_computed_each_time(steps: CapturedSteps, computed: list[tuple[int, ...]]) -> None:
    for _ in range(2):
        run(steps, batch_of([1] * 17))
    assert computed == [(17, 1)] * 2


@torch.inference_mode()
def test_what_cannot_be_captured_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    capture = captured_steps.capture
    monkeypatch.setattr(captured_steps, "capture", lambda compute: tried.append(1) or capture(compute))
    steps = CapturedSteps(lambda batch: (batch.context_lengths.sort().values,) * 3, max_tokens=16)
    for lengths in ([3, 1], [5, 2], [7]):
        assert run(steps, batch_of(lengths))[0] == sorted(lengths)
    assert tried == [1]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """Makes engines, with the given fields of `device`."""
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)

    def make(**device: int) -> Engine:
        run = run_config(folder)
        return load_engine(replace(run, device=replace(run.device, **device)), 4)

    return make


def test_an_engine_gives_the_same_bits_with_captured_steps(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over rows that end one after the other, and tables that grow from one block to many."""
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

    captured = engine_of()
    first = results(captured)
    assert captured.runner._decode_steps._steps
    monkeypatch.setattr(captured_steps, "capture", lambda compute: (None, compute()))
    assert results(engine_of()) == first


PROMPTS = [list(range(3 + i, 24 + i)) for i in range(5)]  # one shape, or chunks of a few
EVERYTHING = DecodeConfig(max_new_tokens=3, logprobs=5, prompt_logprobs=2, ignore_eos=True, prefix_cache=False)


@pytest.mark.parametrize("max_batched_tokens", [2048, 7], ids=["whole", "chunks"])
def test_a_replayed_prompt_has_the_bits_of_a_computed_one(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, max_batched_tokens: int
) -> None:
    def results(prompts_before_capture: int) -> tuple[Engine, list[object]]:
        monkeypatch.setattr(runner, "PROMPTS_BEFORE_CAPTURE", prompts_before_capture)
        engine = engine_of(max_batched_tokens=max_batched_tokens)
        outputs = [generate(engine, [prompt], EVERYTHING)[0] for prompt in PROMPTS]
        return engine, [(output.completions, output.prompt_logprobs) for output in outputs]

    computed_each_time, expected = results(100)
    captured, got = results(1)
    assert got == expected
    assert captured_shapes(captured)
    assert not captured_shapes(computed_each_time)


def test_prompts_over_the_limit_are_computed_each_time(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is of the weights' bytes times the tokens."""
    monkeypatch.setattr(runner, "PROMPTS_BEFORE_CAPTURE", 1)
    weight_bytes = int(engine_of().runner.step_weight_bytes(1))
    for num_tokens, captured in (len(PROMPTS[0]), [len(PROMPTS[0])]), (len(PROMPTS[0]) - 1, []):
        monkeypatch.setattr(runner, "MAX_CAPTURED_BYTES", weight_bytes * num_tokens)
        engine = engine_of()
        for prompt in PROMPTS:
            complete(engine, [prompt], EVERYTHING)
        assert [shape.num_tokens for shape in captured_shapes(engine)] == captured


def captured_shapes(engine: Engine) -> list[BatchShape]:
    steps = engine.runner._prompt_steps
    assert steps is not None
    return [shape for shape, step in steps._steps.items() if isinstance(step, CapturedStep)]


def test_damaged_weights_are_found_in_a_replayed_step(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    group = engine.add(engine.request(0, [3, 4, 5], DecodeConfig(max_new_tokens=8, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    norm = engine.runner.model.get_submodule("model.norm")
    norm.weight.data.fill_(torch.inf)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="the model's logits are not finite: the weights are damaged"):
        engine.step()
    engine.scheduler.cancel(group)
    assert complete(engine_of(), [[3, 4, 5]], DecodeConfig(max_new_tokens=8, ignore_eos=True))


def test_decode_steps_may_have_threads_of_their_own(engine_of: Callable[..., Engine]) -> None:
    library = build.library()
    assert library is not None
    before, seen = library.get_threads(), []
    engine = engine_of(decode_threads=1, threads=2)
    for name in ("forward", "logits"):  # a step that is replayed calls neither
        function = getattr(engine.runner.model, name)
        setattr(engine.runner.model, name, lambda *args, f=function: (seen.append(library.get_threads()), f(*args))[1])
    try:
        complete(engine, [[3, 4, 5]], DecodeConfig(max_new_tokens=4, ignore_eos=True))
        assert seen == [2, 2, 1, 1]
        assert library.get_threads() == 2
    finally:
        library.set_threads(before)
