"""A request that fails inside the engine fails alone: its blocks are freed, and the other requests keep their
tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.decoding import DecodeConfig
from pipelines.engine import Engine, Output, choices, contrastive_search, sequence_groups
from pipelines.engine.contrastive_search import ContrastiveSearch
from pipelines.engine.detokenizer import Detokenizer
from pipelines.engine.request import SamplingContext
from tests.helpers.builders import embedding_weight, engine_of
from tests.helpers.cases import each

PROMPTS = [[0, 70, 71], [0, 75], [0, 80, 81, 82]]
FAULTY = 1  # the request that fails
LENGTHS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
WAYS: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 1.0, "seed": 5},
    {"num_beams": 3, "stop": ["no such text"]},
    {"penalty_alpha": 0.6, "top_k": 3},
]


@pytest.fixture(scope="module")
def engine(chatty: Path) -> Engine:
    return engine_of(chatty, tokenizer="", block_size=4)


def run(engine: Engine, faulty: dict[str, Any], prompts: list[list[int]] = PROMPTS) -> dict[int, Output]:
    """Run all prompts together: greedy requests, and one request with other settings."""
    settings = [faulty if i == FAULTY else {} for i in range(len(PROMPTS))]
    requests = [
        engine.request(i, prompt, DecodeConfig(**LENGTHS, **decode))
        for i, (prompt, decode) in enumerate(zip(prompts, settings, strict=True))
    ]
    outputs = {output.request_id: output for output in engine.generate(requests)}
    engine.scheduler.check_integrity()
    blocks = engine.scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_blocks
    return outputs


def check_it_failed_alone(engine: Engine, faulty: dict[str, Any], expected: dict[int, Output]) -> None:
    outputs = run(engine, faulty)
    assert repr(outputs[FAULTY].error) == "KeyError('what')"
    assert outputs[FAULTY].completions == []
    for i in {0, 2}:
        assert (outputs[i].error, outputs[i].completions) == (None, expected[i].completions)


def fails_at(number: int, real: Callable[..., Any], belongs: Callable[..., bool]) -> Callable[..., Any]:
    """Return `real` with a failure at this number of its calls for the request."""
    calls = []

    def hooked(*arguments: Any) -> Any:
        if belongs(*arguments):
            calls.append(arguments)
            if len(calls) >= number:
                raise KeyError("what")
        return real(*arguments)

    return hooked


@each("decode", WAYS)
@each("number", [1, 5])
def test_a_text_that_cannot_be_made(engine: Engine, decode: dict[str, Any], number: int) -> None:
    expected = run(engine, decode)
    asked = Detokenizer.add
    marks: set[Any] = set()

    def is_faulty(detokenizer: Detokenizer, token_id: int, may_stop: bool) -> bool:
        return detokenizer._decode in marks

    of = sequence_groups.make_detokenizer

    def marked(request: Any, tokenizer: Any) -> Any:
        detokenizer = of(request, tokenizer)
        if request.id == FAULTY and detokenizer:
            marks.add(detokenizer._decode)
        return detokenizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_groups, "make_detokenizer", marked)
        patch.setattr(Detokenizer, "add", fails_at(number, asked, is_faulty))
        check_it_failed_alone(engine, decode, expected)


def test_a_prompt_whose_text_cannot_be_made(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(engine, {})
    of = sequence_groups.make_detokenizer
    monkeypatch.setattr(sequence_groups, "make_detokenizer", fails_at(1, of, lambda request, _: request.id == FAULTY))
    check_it_failed_alone(engine, {}, expected)


@each("decode", WAYS[:2])
@each("number", [1, 3])
def test_a_sampler_that_fails(engine: Engine, decode: dict[str, Any], number: int) -> None:
    """It fails for all rows of the step at once. Running each group alone reveals the one that fails."""
    expected = run(engine, decode)

    def is_faulty(logits: torch.Tensor, contexts: list[SamplingContext]) -> bool:
        return any(context.token_ids[: context.num_prompt_tokens] == PROMPTS[FAULTY] for context in contexts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "sample", fails_at(number, choices.sample, is_faulty))
        check_it_failed_alone(engine, decode, expected)


def test_a_search_that_fails_to_observe_or_to_choose(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(engine, WAYS[3])
    with monkeypatch.context() as patch:
        patch.setattr(ContrastiveSearch, "observe", fails_at(3, ContrastiveSearch.observe, lambda *_: True))
        check_it_failed_alone(engine, WAYS[3], expected)
    monkeypatch.setattr(
        contrastive_search, "process_logits", fails_at(3, contrastive_search.process_logits, lambda *_: True)
    )
    check_it_failed_alone(engine, WAYS[3], expected)


DAMAGED = 90  # a token whose embedding is not finite


@pytest.mark.long
@each("looks_ahead", [False, True])
@each(
    "decode",
    [
        *WAYS,
        {"prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2},
        {"allowed_token_ids": [DAMAGED]},  # reported first, so that the second step fails
    ],
)
def test_a_row_whose_logits_are_not_finite(chatty: Path, decode: dict[str, Any], looks_ahead: bool) -> None:
    """The other rows have the same bits as next to a valid row."""
    engine = engine_of(chatty, tokenizer="", block_size=4)
    engine.looks_ahead = looks_ahead
    expected = run(engine, {})
    assert all(DAMAGED not in c.token_ids for i in {0, 2} for c in expected[i].completions)
    embedding_weight(engine)[DAMAGED] = torch.nan
    prompts = list(PROMPTS)
    if "allowed_token_ids" not in decode:
        prompts[FAULTY] = [0, 75, DAMAGED]
    for _ in range(2):  # the second time over the freed blocks
        outputs = run(engine, decode, prompts)
        assert "the model's logits are not finite: the weights are damaged" in str(outputs[FAULTY].error)
        assert outputs[FAULTY].completions == []
        for i in {0, 2}:
            assert (outputs[i].error, outputs[i].completions) == (None, expected[i].completions)


def torch_out_of_memory_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)  # more than 64-bit processors address
    assert type(raised.value) is RuntimeError
    return raised.value


OF_ALL = [
    MemoryError(),
    OSError("pipe"),
    torch.OutOfMemoryError(),
    KeyboardInterrupt(),
    SystemExit(143),
    torch_out_of_memory_error(),
]


@each("raised", OF_ALL)
def test_an_error_of_the_whole_engine_ends_all_requests(engine: Engine, raised: BaseException) -> None:
    def failing(*_: Any) -> Any:
        raise raised

    for place in ("add", "__init__"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Detokenizer, place, failing)
            with pytest.raises(type(raised)):
                run(engine, {})
    assert run(engine, {})  # after everything is freed


@each("raised", OF_ALL)
def test_a_sampler_that_was_interrupted_is_not_asked_again(engine: Engine, raised: BaseException) -> None:
    """It fails once, so repeating it for each group would hide the interrupt."""
    real, num_calls = choices.sample, 0

    def failing_once(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise raised
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "sample", failing_once)
        with pytest.raises(type(raised)):
            run(engine, {})
        assert num_calls == 1
        assert run(engine, {})  # after everything is freed


def test_exceptions_of_a_sink_are_raised(engine: Engine) -> None:
    """It belongs to the caller, even if its type would otherwise be a request's error."""

    def failing(*piece: Any) -> None:
        raise KeyError(piece)

    for decode in (WAYS[0], WAYS[3]):
        request = engine.request(0, PROMPTS[0], DecodeConfig(**LENGTHS, **decode), failing)
        with pytest.raises(KeyError):
            list(engine.generate([request]))
    assert run(engine, {})


def test_blocks_before_a_damaged_token_are_shared(chatty: Path) -> None:
    """Other prompts find its blocks."""
    engine = engine_of(chatty, tokenizer="", block_size=4)
    beginning = [0, 70, 71, 72, 73, 74, 75, 76]
    expected = run(engine, {}, [PROMPTS[0], [*beginning, 77], PROMPTS[2]])[FAULTY].completions
    assert DAMAGED not in expected[0].token_ids
    engine = engine_of(chatty, tokenizer="", block_size=4)
    embedding_weight(engine)[DAMAGED] = torch.nan
    assert run(engine, {}, [PROMPTS[0], [*beginning, DAMAGED], PROMPTS[2]])[FAULTY].error
    output = run(engine, {}, [PROMPTS[0], [*beginning, 77], PROMPTS[2]])[FAULTY]
    assert (output.error, output.completions) == (None, expected)
