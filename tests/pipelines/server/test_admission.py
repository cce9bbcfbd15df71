"""The wait time of rejected requests, and rejections because of long waits. The clock is the test's."""

from collections.abc import Callable

import pytest

from conf.serving import ServeConfig
from pipelines.server.admission import MAX_RETRY_S, Admission
from pipelines.server.api.errors import ApiError
from tests.helpers.fake_engine import FakeEngine

Tick = Callable[[float, int], None]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def reasons() -> list[str]:
    return []


@pytest.fixture
def waiting(engine: FakeEngine, reasons: list[str]) -> tuple[Admission, Tick]:
    """Return an admission with capacity for one prompt, which waits, and a function that lets time pass while the
    engine computes tokens."""
    now_s, num_computed = 0.0, 0
    admission = Admission(engine, ServeConfig(batch_size=1, max_waiting=0), reasons.append, lambda: now_s)
    engine.say(num_prompt_tokens=0)
    admission.wait(1000)

    def tick(seconds: float, num_tokens: int) -> None:
        nonlocal now_s, num_computed
        now_s, num_computed = now_s + seconds, num_computed + num_tokens
        engine.say(num_prompt_tokens=num_computed, num_waiting=1)

    return admission, tick


def refusal(admission: Admission, timeout_s: float = 3600.0) -> tuple[str, int]:
    """Return the error of a request, and its retry-after seconds."""
    with pytest.raises(ApiError) as refused, admission.place(1, timeout_s), admission.place(1, timeout_s):
        pass
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    return refused.value.message, int(refused.value.headers["retry-after"])


@pytest.mark.parametrize(
    ("seconds", "num_tokens", "retry_s"),
    [(2.0, 200, 10), (1.0, 400, 3), (1.0, 5000, 1), (10.0, 10, MAX_RETRY_S)],
)
def test_the_time_to_come_again_is_that_of_what_waits_at_the_measured_speed(
    waiting: tuple[Admission, Tick], reasons: list[str], seconds: float, num_tokens: int, retry_s: int
) -> None:
    """1,000 tokens at 100, 400, 5,000 and 1 per second."""
    admission, tick = waiting
    tick(seconds, num_tokens)
    message = f"1 sequences run or wait: send the request again after {retry_s} s"
    assert refusal(admission) == (message, retry_s)
    assert reasons == ["sequences"]


def test_who_would_wait_longer_than_it_has_is_refused_at_once(
    waiting: tuple[Admission, Tick], reasons: list[str]
) -> None:
    admission, tick = waiting
    tick(2.0, 200)
    message, retry_s = refusal(admission, 9.0)
    assert message.startswith("the wait is about 10 s, longer than the request's time limit of 9 s: ")
    assert (retry_s, reasons) == (10, ["deadline"])
    with admission.place(1, 11.0):
        pass


def test_no_request_is_rejected_for_its_time_before_the_first_measurement(waiting: tuple[Admission, Tick]) -> None:
    admission, _ = waiting
    assert refusal(admission, 0.001)[1] == 1


def test_a_restarted_counter_changes_no_speed(waiting: tuple[Admission, Tick]) -> None:
    admission, tick = waiting
    tick(2.0, 200)
    assert refusal(admission)[1] == 10
    tick(1.0, -150)  # a restarted process that has computed 50
    assert refusal(admission)[1] == 10
