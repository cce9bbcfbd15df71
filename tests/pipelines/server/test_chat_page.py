"""The page in a browser: type, stream, stop, Chinese text, two tabs at once, and no requests to other hosts."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.builders import REPOSITORY
from tests.helpers.chat_server import ChatServer, chat_server, chunk

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"),
]
TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        running.lines = [chunk(content="你"), chunk(content="好，"), chunk(content="<b>world</b>"), "data: [DONE]"]
        yield running


@pytest.fixture(scope="module")
def address(server: ChatServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("page")
    command = [sys.executable, "run.py", "task=chat", "chat.web=true", f"chat.url={server.url}", "chat.port=0"]
    command += ["chat.system=Be kind.", "decode=sampling", "decode.seed=5", f"hydra.run.dir={folder / 'run'}"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            yield said.removeprefix("the page is at ").strip()
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def tab(browser: Any, address: str) -> Any:
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.elsewhere = []
    page.on("request", lambda request: page.elsewhere.append(request.url))
    page.goto(address)
    return page


def say(page: Any, text: str) -> None:
    box = page.locator("textarea:visible").first
    box.fill(text)
    box.press("Enter")


def test_a_turn_is_answered_with_all_before_it_and_loads_nothing_from_elsewhere(
    browser: Any, address: str, server: ChatServer
) -> None:
    page = tab(browser, address)
    say(page, "你好")
    page.get_by_text("你好，").wait_for()
    # the process has ended
    page.get_by_role("button", name=re.compile("retry|regenerate", re.IGNORECASE)).first.wait_for()
    say(page, "Once more")
    page.get_by_text("你好，").nth(1).wait_for()
    first, second = server.asked[-2:]
    assert [turn["content"] for turn in first["messages"]] == ["Be kind.", "你好"]
    assert [turn["content"] for turn in second["messages"]] == ["Be kind.", "你好", "你好，<b>world</b>", "Once more"]
    assert second == first | {"messages": second["messages"]}
    settings = {"model": "first", "stream": True, "seed": 5, "temperature": 0.8, "top_p": 0.95, "max_tokens": 512}
    assert {name: value for name, value in first.items() if name != "messages"} == settings
    assert [url for url in page.elsewhere if not url.startswith((address, "data:", "blob:"))] == []


def test_stop_ends_the_request(browser: Any, address: str, server: ChatServer) -> None:
    page = tab(browser, address)
    server.left.clear()
    say(page, "endless")
    page.get_by_text("更多 更多").wait_for()
    page.locator("button.stop-button").click()
    assert server.left.wait(TIMEOUT_MS / 1000)
    say(page, "And now?")
    page.get_by_text("你好，").wait_for()


def test_a_slider_is_a_setting_of_the_request(browser: Any, address: str, server: ChatServer) -> None:
    page = tab(browser, address)
    page.get_by_text("Model, tools and sampling").click()
    number = page.get_by_label(re.compile("number input for temperature"))
    number.fill("0.3")
    number.press("Tab")
    say(page, "Hello")
    page.get_by_text("你好，").wait_for()
    assert server.asked[-1]["temperature"] == 0.3


def test_an_answer_is_copied(browser: Any, address: str) -> None:
    page = tab(browser, address)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(page, "Hello")
    # the process has ended
    page.get_by_role("button", name=re.compile("retry|regenerate", re.IGNORECASE)).first.wait_for()
    page.get_by_role("button", name=re.compile("copy message", re.IGNORECASE)).last.click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text == '你好，<b>world</b>')")


def test_reasoning_folds_and_a_call_is_answered_with_its_result(
    browser: Any, address: str, server: ChatServer, tmp_path: Path
) -> None:
    page, lines = tab(browser, address), server.lines
    call = {"index": 0, "id": "a1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    piece = {"index": 0, "function": {"arguments": '{"city": "北京"}'}}
    server.lines = [
        chunk(reasoning_content="hm"),
        chunk(content="Look:"),
        chunk(tool_calls=[call]),
        chunk(tool_calls=[piece]),
    ]
    server.lines.append("data: [DONE]")
    tools = [{"type": "function", "function": {"name": "weather"}}]
    try:
        page.get_by_text("Model, tools and sampling").click()
        page.locator(".cm-content").fill(json.dumps(tools))
        say(page, "Weather?")
        page.get_by_text("Call of weather").wait_for()
        page.get_by_text("Look:").wait_for()
        page.get_by_role("button", name=re.compile("retry|regenerate", re.IGNORECASE)).first.wait_for()
        assert not page.get_by_text("hm", exact=True).is_visible()
        page.get_by_text("Call of weather").click()
        page.get_by_text("北京").wait_for()
        page.screenshot(path=tmp_path / "call.png", animations="disabled")
        server.lines = lines
        say(page, "sunny")
        page.get_by_text("你好，").wait_for()
    finally:
        server.lines = lines
    function = {"name": "weather", "arguments": '{"city": "北京"}'}
    answer = {"role": "assistant", "reasoning_content": "hm", "content": "Look:"}
    answer["tool_calls"] = [{"id": "a1", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "a1", "content": "sunny"}
    assert server.asked[-1]["messages"][1:] == [{"role": "user", "content": "Weather?"}, answer, result]
    assert server.asked[-1]["tools"] == tools


def test_two_tabs_are_answered_at_once(browser: Any, address: str, server: ChatServer) -> None:
    first, second = tab(browser, address), tab(browser, address)
    say(first, "endless")
    first.get_by_text("更多 更多").wait_for()
    say(second, "Hello")
    second.get_by_text("你好，").wait_for()
    server.left.clear()
    first.close()  # a closed tab cancels its request
    assert server.left.wait(TIMEOUT_MS / 1000)


def test_a_servers_error_is_shown_and_the_model_chosen(browser: Any, address: str, server: ChatServer) -> None:
    page = tab(browser, address)
    page.get_by_text("Model, tools and sampling").click()
    page.get_by_label("Model", exact=True).click()
    page.get_by_role("option", name="second").click()
    server.status, lines = 429, server.lines
    server.lines = [json.dumps({"error": {"message": "come back in 7 s"}})]
    try:
        say(page, "Hello")
        page.get_by_text("the server answers 429: come back in 7 s").wait_for()
    finally:
        server.status, server.lines = 200, lines
    assert server.asked[-1]["model"] == "second"


def test_a_busy_port_is_one_line(address: str, server: ChatServer, tmp_path: Path) -> None:
    port = address.rstrip("/").rpartition(":")[2]
    command = [sys.executable, "run.py", "task=chat", "chat.web=true", f"chat.url={server.url}", f"chat.port={port}"]
    done = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path / 'run'}"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert re.search(rf"^error: chat.host=127.0.0.1 chat.port={port} cannot be listened on", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
