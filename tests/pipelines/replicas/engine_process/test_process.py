"""The engine's side, step by step: its input frames and output frames, without a process or a clock."""

import pkgutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from conf.decoding import DecodeConfig
from conf.schema import Task
from conf.serving import ServeConfig
from pipelines.engine import Engine
from pipelines.engine.request import TokenLogprobs
from pipelines.replicas.engine_process import inbox
from pipelines.replicas.engine_process.frames import (
    STEP_TOKENS,
    Accepted,
    Beat,
    Began,
    Cancel,
    Done,
    Logprob,
    Refused,
    Submit,
    SubmitPooled,
)
from pipelines.replicas.engine_process.loading import Served, load_served
from pipelines.replicas.engine_process.process import EngineProcess
from tests.helpers.cases import each
from tests.helpers.engine_script import Script, serve
from tests.helpers.serving import tiny_run
from tests.helpers.waiting import LIMIT_S

BATCH_SIZE = 4
TEXTS = ["Once upon a time", "Tom had a red ball.", "What is 3 + 4?", "小猫", "The end"]


@pytest.fixture(scope="module")
def served() -> Served:
    run = replace(tiny_run(block_size=4), decode=DecodeConfig(temperature=0.0))
    return load_served(replace(run, task=Task.serve, serve=ServeConfig(batch_size=BATCH_SIZE)), Script())  # type: ignore[arg-type]


@pytest.fixture
def engine(served: Served) -> Iterator[Engine]:
    """Return the engine. After the test all its resources must be free."""
    yield served.engine
    served.engine.scheduler.check_integrity()
    blocks = served.engine.scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_blocks


def prompt_of(engine: Engine, text: str = TEXTS[0]) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text, True)


def long_prompt(engine: Engine, num_tokens: int) -> list[int]:
    return (prompt_of(engine, " ".join(TEXTS)) * num_tokens)[:num_tokens]


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_new_tokens": 17},
    {"temperature": 0.9, "n": 3, "seed": 5, "max_new_tokens": 21, "logprobs": 2},
    {"temperature": 0.0, "max_new_tokens": 64, "stop": [" the", "."]},
    {"temperature": 1.2, "top_p": 0.9, "seed": 2**64 - 1, "logprobs": 0, "prompt_logprobs": 3, "max_new_tokens": 9},
    {"temperature": 0.0, "logit_bias": {"300": 90.0}, "stop_token_ids": [300], "include_stop": True},
    {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8},
    {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 8},
]


@each("streams", [False, True])
def test_answers_match_the_engine_alone(served: Served, engine: Engine, streams: bool) -> None:
    wanted = [settings for settings in SETTINGS if not (streams and "num_beams" in settings)]
    prompts = [prompt_of(engine, TEXTS[i % len(TEXTS)]) for i in range(len(wanted))]
    submits = [
        Submit(i, prompt, decode, streams=streams)
        for i, (prompt, decode) in enumerate(zip(prompts, wanted, strict=True))
    ]
    script = serve(served, submits[:3], [], submits[3:])
    for i, (prompt, settings) in enumerate(zip(prompts, wanted, strict=True)):
        (output,) = engine.generate([engine.request(0, prompt, DecodeConfig().replaced(settings))])
        samples, (done,) = script.samples(i), script.of(Done, i)
        assert [sample.text for sample in samples] == [one.text for one in output.completions]
        assert [sample.token_ids for sample in samples] == [one.token_ids for one in output.completions]
        assert [sample.finish_reason for sample in samples] == [one.finish_reason.value for one in output.completions]
        assert [sample.stop_reason for sample in samples] == [one.stop_reason for one in output.completions]
        assert done.num_generated_tokens == sum(len(one.token_ids) for one in output.completions)
        assert (done.num_prompt_tokens, done.error) == (len(prompt), None)
        assert 0 <= done.queue_s <= done.first_token_s <= done.total_s
        for sample, one in zip(samples, output.completions, strict=True):
            check_logprobs(sample.logprobs, one.token_ids, one.logprobs, settings.get("logprobs"))
        check_logprobs(done.prompt_logprobs or [], prompt[1:], output.prompt_logprobs, settings.get("prompt_logprobs"))
        if "seed" in settings:
            assert script.of(Accepted, i)[0].seed == settings["seed"]


def check_logprobs(
    told: list[Logprob], token_ids: list[int], steps: list[TokenLogprobs] | None, num_top: int | None
) -> None:
    if num_top is None:
        assert told == []
        return
    assert [token.token_id for token in told] == token_ids
    for entry, step in zip(told, steps or [], strict=True):
        assert (entry.logprob, entry.rank) == (step.logprobs[entry.token_id], step.ranks[entry.token_id])
        assert len(entry.top) == num_top
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        assert all(step.logprobs[token] == value for token, value in entry.top)
        assert (entry.token_id in dict(entry.top)) == (entry.rank <= num_top)


def test_a_seed_that_was_drawn_is_told_and_gives_the_same_again(served: Served, engine: Engine) -> None:
    decode = {"temperature": 1.0, "max_new_tokens": 30}
    first = serve(served, [Submit(1, prompt_of(engine), decode), Submit(2, prompt_of(engine), decode)])
    seeds = [first.of(Accepted, id)[0].seed for id in (1, 2)]
    assert seeds[0] != seeds[1]
    again = serve(served, [Submit(3, prompt_of(engine), decode | {"seed": seeds[1]}, streams=True)])
    assert again.samples(3)[0].token_ids == first.samples(2)[0].token_ids


def test_waiting_and_running_requests_are_cancelled(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submits = [Submit(id, prompt_of(engine), {"max_new_tokens": 40}, streams=id % 2 == 0) for id in range(7)]
    script = serve(served, submits, [], [], [Cancel(0), Cancel(1), Cancel(6), Cancel(77)], [Cancel(0)], [])
    assert [frame.id for frame in script.of(Done)] == [2, 3, 4, 5]
    last: Beat = script.of(Beat)[-1]
    assert (last.num_running, last.num_waiting, last.cache_usage) == (0, 0, 0)
    assert last.num_generated_tokens == engine.num_generated_tokens
    monkeypatch.setattr(inbox, "TURN_S", 0.0)  # one request is checked before each step
    submits = [Submit(id, prompt_of(engine), {"max_new_tokens": 1}) for id in range(3)]
    script = serve(served, submits, [Cancel(1), Cancel(2)])
    assert [frame.id for frame in script.of(Done)] == [0]
    assert [frame.num_waiting for frame in script.of(Beat)] == [2, 0]


def test_steps_are_counted_by_their_tokens(served: Served, engine: Engine) -> None:
    prompt = long_prompt(engine, 20)
    decode = {"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True, "prefix_cache": False}
    last: Beat = serve(served, [Submit(1, prompt, decode)]).of(Beat)[-1]
    by_limit = dict(zip(STEP_TOKENS, last.num_steps, strict=False))
    assert {limit: number for limit, number in by_limit.items() if number} == {1: 4, 32: 1}
    assert (len(last.num_steps), last.num_step_tokens) == (len(STEP_TOKENS) + 1, 24)


def test_where_all_left_a_beat_says_so(served: Served, engine: Engine) -> None:
    script = serve(served, [Submit(1, prompt_of(engine), {"max_new_tokens": 40})], [], [Cancel(1)])
    assert script.of(Beat)[0].num_running == 1
    assert isinstance(script.sent[-1], Beat)
    assert script.sent[-1].num_running == 0
    assert script.of(Done) == []


@each(
    ("submit", "message"),
    [
        (Submit(1, [], {}), "the prompt has no tokens"),
        (Submit(1, [9999], {}), "prompt token id 9999 is not in the vocabulary"),
        (Submit(1, [1], {"temperature": -1.0}), "decode.temperature=-1.0 is not allowed: give"),
        (Submit(1, [1], {"temprature": 1.0}), "decode.temprature does not exist: .*did you mean"),
        (Submit(1, [1], {"top_p": "x"}), "decode.top_p='x' is not of type"),
        (Submit(1, [1], {"max_new_tokens": 10**6}), "decode.max_new_tokens=1000000 is more than"),
        (Submit(1, [1], {}, adapter="fr"), "adapter"),
        (Submit(1, [1], {"num_beams": 2}, streams=True), "decode.num_beams=2 cannot be streamed"),
        (Submit(1, [1], {"guide": {"regex": "("}}), r"decode\.guide\.regex cannot be used"),
        (SubmitPooled(1, [1]), "continues texts, and gives neither vectors nor scores"),
    ],
)
def test_a_request_that_cannot_run_is_refused(served: Served, engine: Engine, submit: Submit, message: str) -> None:
    script = serve(served, [submit, Submit(2, prompt_of(engine), {"max_new_tokens": 3})])
    (refused,) = script.of(Refused)
    assert refused.id == 1
    assert pytest.raises(AssertionError, match=message).matches(AssertionError(refused.message))
    assert script.of(Accepted, 1) == []
    assert script.of(Done, 2)[0].error is None


def test_a_failed_step_ends_what_ran_and_the_rest_continues(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, calls = engine.executor.execute, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("no more\nmemory")
        return execute(*arguments)

    monkeypatch.setattr(engine.executor, "execute", failing)
    submits = [Submit(id, prompt_of(engine), {"max_new_tokens": 12}, streams=id == 2) for id in range(6)]
    script = serve(served, submits)
    errors = {frame.id: frame.error for frame in script.of(Done)}
    assert errors == dict.fromkeys(range(4), "a step of the engine failed: the server's log says why") | {
        4: None,
        5: None,
    }
    assert script.samples(4)[0].token_ids == script.samples(5)[0].token_ids


@each("kind", [torch.AcceleratorError, None])
def test_behind_what_cannot_be_mended_the_process_ends(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: type | None
) -> None:
    def failing(*arguments: Any) -> Any:
        if kind is None:
            engine.scheduler.running[0].sequences[0].block_table.pop()  # a block that no sequence owns
            raise MemoryError
        raise kind("the device is lost")

    monkeypatch.setattr(engine.executor, "execute", failing)
    with pytest.raises(RuntimeError):
        serve(served, [Submit(1, prompt_of(engine), {"max_new_tokens": 3})])
    leaked = list(engine.scheduler.running)
    for group in leaked:
        engine.scheduler.cancel(group)
    blocks = engine.scheduler.block_manager
    if kind is None:
        owned = [block for block in range(blocks.num_blocks) if blocks.num_owners(block)]
        blocks.free(owned)


def test_a_row_that_fails_fails_alone(served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.engine import step_loop as module

    append_token = module.append_token

    def failing(sequence: Any, *arguments: Any) -> Any:
        if sequence.request.id == 2 and sequence.num_output_tokens == 3:
            raise ValueError("bad row")
        return append_token(sequence, *arguments)

    monkeypatch.setattr(module, "append_token", failing)
    submits = [Submit(id, prompt_of(engine), {"max_new_tokens": 12}, streams=True) for id in (1, 2, 3)]
    script = serve(served, submits)
    assert {frame.id: frame.error for frame in script.of(Done)} == {
        1: None,
        2: "the engine failed: the server's log says why",
        3: None,
    }
    assert len(script.samples(1)[0].token_ids) == 12


def test_the_background_waits_for_all_others_and_has_half_of_the_places(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[list[int]] = []
    step = engine.step

    def watched(max_tokens: int | None = None) -> None:
        step(max_tokens)
        running.append([group.request.id for group in engine.scheduler.running])

    monkeypatch.setattr(engine, "step", watched)
    background = [
        Submit(id, prompt_of(engine), {"max_new_tokens": 9, "ignore_eos": True}, is_background=True)
        for id in range(100, 106)
    ]
    online = [Submit(id, prompt_of(engine), {"max_new_tokens": 5, "ignore_eos": True}) for id in range(1, 9)]
    script = serve(served, background, [], [], online, [Cancel(105)])
    done = [frame.id for frame in script.of(Done)]
    assert sorted(done) == [1, 2, 3, 4, 5, 6, 7, 8, 100, 101, 102, 103, 104]
    assert running[0] == [100, 101]
    assert max(sum(id >= 100 for id in ids) for ids in running) == BATCH_SIZE // 2
    first_of = {id: next(i for i, ids in enumerate(running) if id in ids) for id in (8, 102, 103)}
    assert first_of[102] >= first_of[8]  # no background request begins while another request waits
    assert script.of(Beat)[0].num_waiting == 4


def test_a_client_that_reads_nothing_delays_no_request(served: Served, engine: Engine) -> None:
    decode = {"max_new_tokens": 50, "ignore_eos": True}
    submits = [Submit(1, prompt_of(engine), decode, streams=True), Submit(2, prompt_of(engine), decode)]
    before, sent = engine.num_generated_tokens, list[Any]()

    def unblock() -> None:
        sent.extend(script.sent)
        script.is_blocked = False

    script = Script(submits, *([[]] * 60), unblock, [])
    script.is_blocked = True
    EngineProcess(script, served, 200.0).serve()  # type: ignore[arg-type]
    assert engine.num_generated_tokens == before + 100
    assert {type(frame) for frame in sent} == {Began, Accepted}
    assert script.samples(1)[0].num_deltas == 1
    assert script.samples(1)[0].text == script.samples(2)[0].text
    assert [frame.id for frame in script.of(Done)] == [1, 2]


def test_a_long_prompt_stalls_no_stream(served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that takes 10 ms for a step and 1 ms for each of its tokens."""
    now_s, steps = 0.0, list[tuple[int, float]]()
    step = engine.step

    def timed(max_tokens: int | None = None) -> None:
        nonlocal now_s
        before = engine.num_computed_tokens
        step(max_tokens)
        num_tokens = engine.num_computed_tokens - before
        now_s += 0.010 + 0.001 * num_tokens
        steps.append((num_tokens, 10.0 + num_tokens))

    monkeypatch.setattr(engine, "step", timed)
    stream = Submit(1, prompt_of(engine), {"max_new_tokens": 60, "ignore_eos": True}, streams=True)
    long = Submit(2, long_prompt(engine, 500), {"max_new_tokens": 2, "prefix_cache": False})
    alone = Submit(3, long_prompt(engine, 400), {"max_new_tokens": 2, "prefix_cache": False})
    script = serve(served, [stream], [], [], [long], *([[]] * 100), [alone], clock=lambda: now_s, max_step_ms=50.0)
    assert max(ms for _, ms in steps[1:60]) <= 50.0
    assert sum(num_tokens for num_tokens, _ in steps[1:60]) >= 500
    assert max(num_tokens for num_tokens, _ in steps[60:]) == 400
    assert [frame.error for frame in script.of(Done)] == [None] * 3


class StepClock:
    """Counts an engine's steps, and calls functions that wait for a number of steps."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_steps, self._step = 0, engine.step
        self.reached = threading.Event()
        monkeypatch.setattr(engine, "step", self.step)

    def step(self, max_tokens: int | None = None) -> None:
        self._step(max_tokens)
        self.num_steps += 1
        if self.num_steps == 10:
            self.reached.set()


@each(
    ("slow", "decode"),
    [
        ("pipelines.engine.guide._lark", {"guide": {"choice": ["yes", "no"]}}),
        ("pipelines.engine.request_factory.RequestFactory._encode_words", {"bad_words": ["yes", "no"]}),
    ],
)
def test_settings_that_take_long_stall_no_stream(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch, slow: str, decode: dict[str, Any]
) -> None:
    """Their preparation waits for ten steps of the concurrent stream."""
    clock, original = StepClock(engine, monkeypatch), pkgutil.resolve_name(slow)

    def waiting(*arguments: Any) -> Any:
        assert not arguments[-1] or clock.reached.wait(LIMIT_S / 4), "no steps"
        return original(*arguments)

    monkeypatch.setattr(slow, waiting)
    engine.requests.__dict__.pop("_bad_words", None)  # which has the original
    stream = Submit(1, prompt_of(engine), {"max_new_tokens": 30, "ignore_eos": True}, streams=True)
    script = serve(served, [stream], [], [Submit(2, prompt_of(engine), {"max_new_tokens": 30, **decode})])
    assert {frame.id: frame.error for frame in script.of(Done)} == {1: None, 2: None}
    (completion,) = script.samples(2)
    assert completion.text in ("yes", "no") if "guide" in decode else "yes" not in completion.text
    assert [frame.id for frame in script.of(Accepted)] == [1, 2]


def test_an_idle_engine_waits_for_a_request_in_preparation(served: Served, engine: Engine) -> None:
    """If nothing else runs, the engine waits for it. A cancelled request gets no answer."""
    guided = [Submit(id, prompt_of(engine), {"guide": {"choice": [f"a{id}", "b"]}}) for id in (1, 2, 3)]
    script = serve(served, guided, [Cancel(3)])
    assert [frame.id for frame in script.of(Done)] == [1, 2]
    left = serve(served, [guided[0], guided[1], Cancel(1)])
    assert [frame.id for frame in left.of(Accepted)] == [2]


def test_requests_are_reported_before_their_first_step(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the step ends the process, the other requests only waited."""
    told: list[list[int]] = []
    step = engine.step

    def watched(max_tokens: int | None = None) -> None:
        state = dict.fromkeys(range(6), "new")
        for frame in script.sent:
            if isinstance(frame, Began):
                state |= dict.fromkeys(frame.ids, "begun")
            elif isinstance(frame, Accepted):
                state[frame.id] = "waits"
        told.append([id for id, status in state.items() if status == "begun"])
        step(max_tokens)
        assert {group.request.id for group in engine.scheduler.running} <= set(told[-1])

    monkeypatch.setattr(engine, "step", watched)
    submits = [Submit(id, prompt_of(engine), {"max_new_tokens": 5 + id, "ignore_eos": True}) for id in range(6)]
    script = Script(submits)
    EngineProcess(script, served, 200.0).serve()  # type: ignore[arg-type]
    assert told[0] == [0, 1, 2, 3]
    assert told[-1] == [0, 1, 2, 3, 4, 5]
    assert [frame.id for frame in script.of(Done)] == [0, 1, 2, 3, 4, 5]


def test_many_requests_are_looked_at_between_steps_and_in_their_order(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that takes 15 ms per request, running requests get a step after every second one."""
    now_s, events = 0.0, list[int | str]()
    request, step = engine.request, engine.step

    def slow_request(id: int, *arguments: Any, **named: Any) -> Any:
        nonlocal now_s
        now_s += 0.015
        events.append(id)
        return request(id, *arguments, **named)

    def told_step(max_tokens: int | None = None) -> None:
        events.append("step")
        step(max_tokens)

    monkeypatch.setattr(engine, "request", slow_request)
    monkeypatch.setattr(engine, "step", told_step)
    submits = [Submit(id, prompt_of(engine), {"max_new_tokens": 3, "ignore_eos": True}) for id in range(10)]
    script = serve(served, [*submits, Cancel(7)], [], [Cancel(8)], clock=lambda: now_s)
    assert [event for event in events if event != "step"] == [0, 1, 2, 3, 4, 5, 6, 9]
    assert events[:6] == [0, 1, "step", 2, 3, "step"]
    assert sorted(frame.id for frame in script.of(Done)) == [0, 1, 2, 3, 4, 5, 6, 9]


def test_a_panic_in_a_step_ends_what_ran_alone(served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of Rust code is not a subclass of Exception."""
    panic = type("PanicException", (BaseException,), {})
    execute, calls = engine.executor.execute, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise panic("index out of range")
        return execute(*arguments)

    monkeypatch.setattr(engine.executor, "execute", failing)
    script = serve(served, [Submit(1, prompt_of(engine), {"max_new_tokens": 9})], *([[]] * 20), [submit_of(engine, 2)])
    errors = {frame.id: frame.error for frame in script.of(Done)}
    assert errors == {1: "a step of the engine failed: the server's log says why", 2: None}


def submit_of(engine: Engine, id: int) -> Submit:
    return Submit(id, prompt_of(engine), {"max_new_tokens": 3})
