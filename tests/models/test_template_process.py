"""Chat templates are limited in time, memory and length. A violation ends one conversation, and the next one is
rendered."""

import gc
import os
import signal
import subprocess
import threading
from typing import Any

import pytest

from conf.errors import UserError
from models.tokenizers import template_process
from models.tokenizers.template_process import TemplateProcess
from tests.helpers.cases import each

MESSAGES = [{"role": "user", "content": "hi"}]
PLAIN = "{{ messages[0].content }}!"
TWICE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
SHARED = (
    "{% set ns = namespace(x=[1], y=[1]) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}"
)
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return the processes that are started from now on."""
    processes: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def noted(*arguments: Any, **named: Any) -> Any:
        processes.append(real(*arguments, **named))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    return processes


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch) -> TemplateProcess:
    monkeypatch.setattr(template_process, "CPU_S", 0.15)
    monkeypatch.setattr(template_process, "MEMORY", 2**28)
    return TemplateProcess()


def render(templates: TemplateProcess, template: str) -> str:
    return templates.render(template, MESSAGES, {})


@each(
    "template",
    [LOOPS, MACRO, SHARED, "{{ 7 ** (7 ** 9) }}"],
)
def test_time_ends_a_template(templates: TemplateProcess, template: str) -> None:
    with pytest.raises(
        UserError, match=r"the chat template was stopped, because it takes more than 0.15 s: give predict"
    ):
        render(templates, template)
    assert render(templates, PLAIN) == "hi!"


def test_the_length_of_its_text_ends_a_template_but_not_that_of_the_messages(templates: TemplateProcess) -> None:
    with pytest.raises(UserError, match=r"take these messages: it writes 2000000 characters, more than 104\d{4}"):
        render(templates, "{{ 'ab' * 1000000 }}")
    long = [{"role": "user", "content": "ab" * 1_000_000}]
    assert templates.render(PLAIN, long, {}) == "ab" * 1_000_000 + "!"


@each(
    "template, message",
    [
        *(
            (f"{{{{ {text} }}}}", "MemoryError")
            for text in ("'a' * 10 ** 10", "'a' | center(10 ** 9)", "[0] * 10 ** 9")
        ),
        ("{{ '%1000000000d' % 1 }}", "MemoryError"),
        (TWICE, "MemoryError|was stopped, because it takes more than"),
        ("{{ '\ud800' }}", "surrogates not allowed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ messages[0].content.nope() }}", "has no attribute 'nope'"),
    ],
)
def test_memory_and_faults_end_a_template(templates: TemplateProcess, template: str, message: str) -> None:
    with pytest.raises(UserError, match=f"the chat template (does not take these messages: .*)?({message})"):
        render(templates, template)
    assert render(templates, PLAIN) == "hi!"


def test_it_serves_any_thread_and_leaves_none(templates: TemplateProcess) -> None:
    before, results = threading.active_count(), []

    def work(i: int) -> None:
        results.append(templates.render("{{ messages[0].content }}", [{"role": "user", "content": f"{i}" * 1000}], {}))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [f"{i}" * 1000 for i in range(8)]
    assert threading.active_count() == before


def test_no_answer_is_taken_for_another_after_an_interrupt(
    templates: TemplateProcess, started: list[subprocess.Popen[bytes]]
) -> None:
    assert render(templates, PLAIN) == "hi!"

    class Interrupted:
        def readline(self) -> bytes:
            raise KeyboardInterrupt

        def close(self) -> None: ...

        closed = True

    (process,) = started
    process.stdout = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        render(templates, "one")
    assert process.poll() is not None
    assert render(templates, "another") == "another"


@each("number, raised", [(signal.SIGKILL, OSError), (signal.SIGSEGV, UserError)])
def test_a_process_that_was_killed_is_not_a_fault_of_the_row(
    templates: TemplateProcess,
    started: list[subprocess.Popen[bytes]],
    number: signal.Signals,
    raised: type[Exception],
) -> None:
    assert render(templates, PLAIN) == "hi!"
    process = started[-1]
    assert os.getpgid(process.pid) != os.getpgid(0)  # signals to the whole job do not reach it
    os.kill(process.pid, number)
    with pytest.raises(raised, match="was killed|was stopped, because its process ended with -11"):
        render(templates, PLAIN)
    assert render(templates, PLAIN) == "hi!"


@pytest.mark.long
def test_the_process_is_one_and_ends_with_its_owner(started: list[subprocess.Popen[bytes]]) -> None:
    templates = TemplateProcess()
    assert [render(templates, PLAIN) for _ in range(20)] == ["hi!"] * 20
    del templates
    gc.collect()
    assert [process.returncode is not None for process in started] == [True]
