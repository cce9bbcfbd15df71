"""A first signal waits for the end of a step, but not for input; a second signal does not wait."""

import os
import signal
import threading

import pytest

from pipelines.jobs.interrupt import SIGNALS, Interrupted, Interruption, interruption
from tests.helpers.cases import each


@each("number", SIGNALS)
def test_the_first_signal_waits_and_the_second_does_not(number: signal.Signals) -> None:
    with interruption() as signals:
        os.kill(os.getpid(), number)
        with pytest.raises(Interrupted) as raised:
            signals.check()
        assert raised.value.code == 128 + number
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), number)


def test_no_signal_waits_for_input() -> None:
    reader, writer = os.pipe()
    with interruption() as signals, open(reader) as lines:
        os.write(writer, b"one\n")
        items = signals.checked(lines)
        assert next(items) == "one\n"
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(Interrupted):  # the writer stays open, so the next line would never come
            next(items)
    os.close(writer)


def test_a_signal_between_items_is_noticed_at_the_next() -> None:
    with interruption() as signals:
        items = signals.checked([1, 2])
        assert next(items) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            next(items)
    assert list(Interruption().checked([1, 2])) == [1, 2]


def test_handlers_are_restored_and_another_thread_sets_none() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with interruption():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    seen = []

    def work() -> None:
        with interruption() as signals:
            seen.append([signal.getsignal(number) for number in SIGNALS])
            signals.check()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[signal.getsignal(number) for number in SIGNALS]]
