"""The page at / in a headless Chromium, with a fake model. Without a browser these tests are skipped."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.conftest import LiveServer
from tests.server.tool_chat import CALL, THINKING, TOOL

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
expect = playwright.expect
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium"),
]
WIDTHS = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}
WAIT_MILLISECONDS = 20_000
KEY_PROMPT = "This server asks for a key."


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for all tests of this module."""
    expect.set_options(timeout=WAIT_MILLISECONDS)
    with playwright.sync_playwright() as started:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = started.chromium.launch(executable_path=BROWSER, args=flags)
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server in a fresh context; a script that fails or is refused fails the test."""
    contexts: list[Any] = []
    problems: list[str] = []

    def open_one(server: LiveServer, width: str = "desktop", **options: Any) -> Any:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        contexts.append(browser.new_context(viewport=size, **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if "Policy" in line.text else None)
        page.goto(server.url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server whose model thinks and calls tools."""
    started = LiveServer(FAKE_CHAT_TEMPLATE=THINKING).ready()
    yield started
    started.close()
    assert "Traceback" not in started.log, started.log


def ask(page: Any, text: str) -> Any:
    """Send a message, and return its answer."""
    number = page.locator("article.assistant").count()
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    return page.locator("article.assistant").nth(number)


def wait_until_done(answer: Any) -> None:
    """Wait until an answer is complete."""
    expect(answer).to_have_attribute("aria-busy", "false")


def test_figures_follow_the_text(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    answer = ask(page, "tokens=60 delay=0.001")
    wait_until_done(answer)
    expect(answer.locator(".content")).to_contain_text("t59")
    figures = answer.locator(".numbers")
    expect(figures).to_have_text(re.compile(r"TTFT \d.*tokens/s60 tokensprompt 21cached 0finish stop"))
    expect(page.get_by_role("button", name="Send")).to_be_visible()


@pytest.mark.parametrize("with_key", [False, True])
def test_tokens_stream_and_stop_ends_the_request(open_page: Any, server: LiveServer, with_key: bool) -> None:
    page = open_page(server)
    answer = ask(page, "tokens=2000 delay=0.01")
    expect(answer.locator(".content")).to_contain_text("t5 ")
    assert answer.get_attribute("aria-busy") == "true", "20 s of text came in one piece"
    expect(page.locator("#sequences tr.mine")).to_have_count(1)
    expect(page.get_by_role("button", name="Send")).to_be_hidden()
    if with_key:
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    wait_until_done(answer)
    expect(answer.get_by_role("alert")).to_have_text("Stopped.")
    expect(answer.locator(".content")).to_contain_text("t5 ")
    expect(page.locator("#sequences tr")).to_have_count(0)
    server.wait_until_idle()


def test_regenerate_and_edit_replace_what_came_after(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    wait_until_done(ask(page, "tokens=2"))
    wait_until_done(ask(page, "again"))
    page.locator("article.assistant").first.get_by_role("button", name="Regenerate").click()
    expect(page.locator("article")).to_have_count(2)
    wait_until_done(page.locator("article.assistant"))
    page.locator("article.user").get_by_role("button", name="Edit").click()
    field = page.get_by_label("Edited message")
    expect(field).to_have_value("tokens=2")
    field.fill("tokens=7")
    field.press("Enter")
    expect(page.locator("article.assistant .content")).to_contain_text("t6")
    expect(page.locator("article")).to_have_count(2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)


def test_settings_reach_the_request_and_wrong_ones_are_shown(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("size=2")
    page.get_by_label("Max tokens").fill("3")
    answer = ask(page, "tokens=9")
    wait_until_done(answer)
    expect(answer.locator(".content")).to_have_text("t0 t0 t1 t1 t2 t2 ")
    expect(answer.locator(".numbers")).to_contain_text("finish length")
    page.reload()
    expect(page.get_by_role("button", name="Settings (2)")).to_be_visible()
    page.get_by_role("button", name="Settings (2)").click()
    page.get_by_label("JSON schema").fill("{")
    ask(page, "tokens=9")
    expect(page.locator("article")).to_have_count(0)
    expect(page.locator(":invalid").last).to_be_focused()


def test_reasoning_is_folded_and_tool_calls_are_shown(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    answer = ask(page, "say:<think>a thought</think>Look:\n```\nx < 1\n```\nDone <b>.")
    wait_until_done(answer)
    expect(answer.locator(".content pre")).to_have_text("x < 1")
    expect(answer.locator(".content")).to_contain_text("Done <b>.")
    expect(answer.locator(".thoughts")).to_be_hidden()
    answer.get_by_text("Reasoning").click()
    expect(answer.locator(".thoughts")).to_have_text("a thought")
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill(str([TOOL]).replace("'", '"'))
    answer = ask(page, f"say:{CALL}")
    wait_until_done(answer)
    expect(answer.locator(".call")).to_contain_text("get_weather")
    expect(answer.locator(".call pre")).to_contain_text('"city": "Paris"')
    expect(answer.locator(".numbers")).to_contain_text("finish tool_calls")
    answer.get_by_label("Result of get_weather").fill("sunny")
    answer.get_by_role("button", name="Return results").click()
    expect(page.locator("article.result")).to_have_text("sunny")
    expect(page.locator("article.assistant")).to_have_count(2)


def test_json_is_shown_indented(open_page: Any, server: LiveServer) -> None:
    answer = ask(open_page(server), 'say:{"a": [1, 2]}')
    wait_until_done(answer)
    expect(answer.locator("pre.json")).to_have_text('{\n  "a": [\n    1,\n    2\n  ]\n}')


def test_the_engine_shows_the_answer_and_the_pool_drains(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    expect(page.locator("#status")).to_have_text("live")
    answer = ask(page, "tokens=2000 delay=0.01")
    expect(page.locator("#sequences tr.mine")).to_contain_text("this chatdecode")
    expect(page.get_by_role("img", name=re.compile("1,000 pages 1 are used by one sequence"))).to_be_visible()
    expect(page.locator("#model")).to_have_text("fake-model")
    page.keyboard.press("Escape")
    wait_until_done(answer)
    expect(page.locator("#sequences tr")).to_have_count(0)
    expect(page.get_by_role("img", name=re.compile("0 are used by one .* 1,000 free"))).to_be_visible()
    expect(page.locator(".chart .line").first).to_have_attribute("d", re.compile("L"))


def test_a_wrong_key_is_asked_for_again(open_page: Any, start: Callable[..., LiveServer]) -> None:
    server = start("--api-key", "right-kéy").ready()
    page = open_page(server)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(KEY_PROMPT)
    field = dialog.get_by_label("Key of this server")
    expect(field).to_be_focused()
    field.fill("wrong")
    field.press("Enter")
    expect(dialog).to_contain_text("does not know this key")
    expect(page.locator("#status")).to_have_text("needs a key")
    field.fill("right-kéy")
    field.press("Enter")
    expect(page.locator("#status")).to_have_text("live")
    answer = ask(page, "tokens=3")
    wait_until_done(answer)
    expect(answer.locator(".content")).to_contain_text("t2")


def test_a_connection_that_drops_leaves_the_text_and_says_so(
    open_page: Any, start: Callable[..., LiveServer]
) -> None:
    server = start().ready()
    page = open_page(server)
    answer = ask(page, "tokens=2000 delay=0.01")
    expect(answer.locator(".content")).to_contain_text("t5 ")
    server.process.send_signal(signal.SIGKILL)
    wait_until_done(answer)
    expect(answer.get_by_role("alert")).to_contain_text("The connection was lost")
    expect(answer.locator(".content")).to_contain_text("t5 ")
    expect(page.locator("#status")).to_have_text("reconnecting")
    expect(page.locator("#engine")).to_have_class(re.compile("stale"))
    again = start("--port", str(server.port)).ready()
    expect(page.locator("#status")).to_have_text("live")
    answer.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#sequences tr.mine")).to_have_count(1)
    assert again.get("/load").json()["running"] == 1
    page.keyboard.press("Escape")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(
    open_page: Any, server: LiveServer, width: str, scheme: str
) -> None:
    page = open_page(server, width, color_scheme=scheme)
    wait_until_done(ask(page, f"say:{'word ' * 40}{'x' * 300}"))
    for view in ("Chat", "Engine"):
        if width != "desktop":
            page.get_by_role("button", name=view, exact=True).click()
            expect(page.get_by_role("region", name="Chat")).to_be_visible(visible=view == "Chat")
        for part in ("body", ".bar", "#turns", "#engine"):
            box = page.locator(part).evaluate("(node) => [node.scrollWidth, node.clientWidth]")
            assert box[0] <= box[1], f"{part} is {box[0]} pixels wide on a {width}"


def test_every_control_has_a_name_and_can_be_reached_by_keyboard(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    page.get_by_role("button", name="Settings").click()
    names = page.locator("button, input, textarea, a, progress, canvas, svg").evaluate_all(
        "(nodes) => nodes.map((node) => node.ariaLabel || node.labels?.[0]?.textContent || node.textContent)"
    )
    assert all(name.strip() for name in names), names
    page.get_by_label("Message").focus()
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.name || document.activeElement.textContent"))
    assert {"Settings", "New chat", "Send", "temperature", "seed", "tools"} <= reached
