"""The pages at / and /docs in a headless Chromium, with a fake model; skipped where there is no browser."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from server.schema.chat import ChatRequest
from tests.server.conftest import LiveServer
from tests.server.tool_chat import CALL, THINKING, TOOL

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
expect = playwright.expect
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium"),
]
WIDTHS = {"phone": (375, 812), "tablet": (820, 1180), "desktop": (1440, 900)}
WAIT_MILLISECONDS = 20_000
MODEL = "SmolLM2-135M-Instruct"
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

    def open_one(server: LiveServer, width: str = "desktop", script: str = "", **options: Any) -> Any:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        contexts.append(browser.new_context(viewport=size, **options))
        contexts[-1].add_init_script(script)
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
    started = LiveServer("--served-model-name", MODEL, FAKE_CHAT_TEMPLATE=THINKING).ready()
    yield started
    started.close()
    assert "Traceback" not in started.log, started.log


def ask(page: Any, text: str) -> Any:
    """Send a message, and return its answer."""
    number = page.locator("article.assistant").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")
    return page.locator("article.assistant").nth(number)


def wait_until_done(answer: Any) -> None:
    """Wait until an answer is complete."""
    expect(answer).to_have_attribute("aria-busy", "false")


def answer_with(page: Any, *answers: list[dict[str, Any]]) -> list[str]:
    """Answer each request in the server's place, by a chunk for each choice; further ones get no answer.

    Returns the list of their bodies, which grows.
    """
    bodies: list[str] = []

    def take(route: Any) -> None:
        bodies.append(route.request.post_data)
        if len(bodies) <= len(answers):
            chunks = [{"id": "chatcmpl-x", "choices": [choice]} for choice in answers[len(bodies) - 1]]
            events = [*map(json.dumps, chunks), "[DONE]"]
            body = "".join(f"data: {event}\n\n" for event in events)
            route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", take)
    return bodies


def a_call(arguments: str, finish: str = "tool_calls") -> dict[str, Any]:
    """The choice of an answer that calls a tool."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"index": 0, "id": "call-1", "type": "function", "function": function}
    return {"delta": {"tool_calls": [call]}, "finish_reason": finish}


def a_text(content: str) -> dict[str, Any]:
    """The choice of an answer in words."""
    return {"delta": {"content": content}, "finish_reason": "stop"}


def roles(body: str) -> list[str]:
    """The roles of a request's messages."""
    return [message["role"] for message in json.loads(body)["messages"]]


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
    expect(page.get_by_role("log")).to_be_focused()
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


def test_one_answer_runs_at_a_time_and_results_stay_behind_their_calls(
    open_page: Any, server: LiveServer
) -> None:
    page = open_page(server)
    bodies = answer_with(page, [a_call('{"city": "Pa', "length")], [a_call("{}")])
    cut = ask(page, "one")
    wait_until_done(cut)
    expect(cut.locator(".call pre")).to_have_text('{"city": "Pa')
    expect(cut.get_by_role("button", name="Return results")).to_have_count(0)
    cut.get_by_role("button", name="Regenerate").click()
    first = page.locator("article.assistant")
    wait_until_done(first)
    expect(first.get_by_label("Result of get_weather")).to_be_visible()
    page.locator("article.user").get_by_role("button", name="Edit").click()
    ask(page, "two")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(first.get_by_label("Result of get_weather")).to_be_hidden()
    # None of what starts an answer does so beside another: hidden ones are pressed, too.
    page.locator(".starts").evaluate_all("(buttons) => buttons.forEach((button) => button.click())")
    edited = page.get_by_label("Edited message")
    edited.press("Enter")
    ask(page, "three")
    expect(page.locator("article")).to_have_count(4)
    edited.press("Escape")  # ends the editing alone
    expect(page.locator("article.user").first.get_by_role("button", name="Edit")).to_be_focused()
    page.get_by_role("button", name="API key").click()
    page.get_by_label("Key of this server").press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert [roles(body) for body in bodies] == [["user"], ["user"], ["user", "assistant", "user"]]
    page.locator("article.user").first.get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Send again").click()
    expect(page.locator("article")).to_have_count(2)
    assert roles(bodies[-1]) == ["user"] and len(bodies) == 4


def test_settings_take_what_the_api_takes(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    bodies = answer_with(page, [a_text("done")])
    page.get_by_role("button", name="Settings").click()
    fields = ChatRequest.model_json_schema()["properties"]
    for box in page.locator("input[type=number]").all():
        name = box.get_attribute("name")
        limits = fields[name]["anyOf"][0]
        least = limits.get("minimum", limits.get("exclusiveMinimum"))
        most = limits.get("maximum", limits.get("exclusiveMaximum", 1) - 1)
        if name == "seed":  # the browser's numbers are exact up to here
            least, most = 1 - 2**53, 2**53 - 1
        assert [float(box.get_attribute(bound)) for bound in ("min", "max")] == [least, most], name
        box.fill("2" if limits["type"] == "integer" else "0.123")
    page.get_by_label("Seed").fill("-1")
    page.get_by_label("Temperature").press("ArrowUp")
    number = "12345678901234567890"
    page.get_by_label("JSON schema").fill(f'{{"const": {number}}}')
    wait_until_done(ask(page, "hi"))
    sent = json.loads(bodies[0])
    assert (sent["top_p"], sent["repetition_penalty"], sent["seed"]) == (0.123, 0.123, -1)
    assert sent["temperature"] == 0.15, "an arrow key goes to the next step"
    assert number in bodies[0]


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
    expect(page.get_by_role("log")).to_be_focused()
    expect(page.locator("article.assistant")).to_have_count(2)


def test_json_is_indented_and_else_shown_as_written(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    content = '{"a": [12345678901234567890, 1.0], "a": {}, "b\\"[": "\\u00e9: {,"}'
    answer_with(page, [a_text(content)], [a_call('{"id":1e2}')])
    answer = ask(page, "hi")
    wait_until_done(answer)
    shown = '{\n  "a": [\n    12345678901234567890,\n    1.0\n  ],\n  "a": {},\n  "b\\"[": "\\u00e9: {,"\n}'
    assert answer.locator("pre.json").text_content() == shown
    answer = ask(page, "again")
    wait_until_done(answer)
    assert answer.locator(".call pre").text_content() == '{\n  "id": 1e2\n}'


# A text, and its parts: paragraphs, and blocks of code as lists.
FENCED: list[tuple[str, list[str | list[str]]]] = [
    ("a\n```py\nx\n\ny\n```\nb", ["a", ["x\n\ny"], "b"]),
    ("```hello in one line", ["```hello in one line"]),
    ("a\n```", ["a\n```"]),
    ("```\nx\n```", [["x"]]),
    ("```\nx", [["x"]]),
    ("t\n````md\n```py\nx\n```\n````\nafter", ["t", ["```py\nx\n```"], "after"]),
    ("```\n~~~\n```sh\n```\nb", [["~~~\n```sh"], "b"]),
    ("~~~\n```\n~~~~\nb", [["```"], "b"]),
    ("- a\n  ```py\n  x\n    y\n z\n  ```\n- b", ["- a", ["x\n  y\nz"], "- b"]),
    ("a\nb\n\n  \n\nc\n\n```\n\nd\n```\n\n", ["a\nb", "c", ["\nd"]]),
    (" poem:\n\n    a\n  b\n\n\tc", ["poem:", "    a\n  b", "\tc"]),
    ("use ```x``` or `y`\n```x``` too", ["use ```x``` or `y`\n```x``` too"]),
]


def test_blocks_of_code_are_told_from_text_however_it_is_split(open_page: Any, server: LiveServer) -> None:
    shown = open_page(server).evaluate(
        """async (texts) => {
            const { StreamedText } = await import("./web/text.js");
            const render = (pieces) => {
                const node = document.createElement("div");
                const streamed = new StreamedText(node);
                for (const piece of pieces) streamed.append(piece);
                streamed.end();
                const part = ({ tagName, textContent }) => (tagName === "PRE" ? [textContent] : textContent);
                return [...node.children].map(part);
            };
            return texts.map((text) => [render([text]), render([...text])]);
        }""",
        [text for text, _ in FENCED],
    )
    for (text, parts), (at_once, by_characters) in zip(FENCED, shown, strict=True):
        assert at_once == by_characters == parts, text


def test_long_answers_are_shown_once_a_frame_in_pieces(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    number = 2000
    answer_with(
        page,
        [a_text(f"{word}\n" if word % 20 == 19 else f"{word} ") for word in range(number)]
        + number * [a_call("word ")],
    )
    page.evaluate(
        """() => {
            window.changes = 0;
            const observer = new MutationObserver((found) => (window.changes += found.length));
            const all = { childList: true, characterData: true, subtree: true };
            observer.observe(document.getElementById("turns"), all);
        }"""
    )
    answer = ask(page, "hi")
    wait_until_done(answer)
    assert page.evaluate("window.changes") < number
    pieces = answer.locator(".content .piece").evaluate_all(
        "(nodes) => nodes.map((node) => node.textContent)"
    )
    assert "".join(pieces).split() == [str(word) for word in range(number)]
    assert max(map(len, pieces)) < 5000, "the browser lays out all of a piece at each change"


def test_the_engine_shows_the_answer_and_the_pool_drains(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    expect(page.locator("#status")).to_have_text("live")
    answer = ask(page, "tokens=2000 delay=0.01")
    expect(page.locator("#sequences tr.mine")).to_contain_text("this chatdecode")
    expect(page.get_by_role("img", name=re.compile("1,000 pages 1 are used by one sequence"))).to_be_visible()
    expect(page.locator("#model")).to_have_text(MODEL)
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


def test_the_page_works_where_the_browser_keeps_nothing(open_page: Any, server: LiveServer) -> None:
    blocked = """for (const name of ["localStorage", "sessionStorage"])
        Object.defineProperty(window, name, { get() { throw new DOMException("", "SecurityError"); } });"""
    page = open_page(server, script=blocked)
    expect(page.locator("#status")).to_have_text("live")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("2")
    answer = ask(page, "tokens=9")
    wait_until_done(answer)
    expect(answer.locator(".numbers")).to_contain_text("finish length")


def test_docs_know_the_key_and_hold_their_files_at_any_spelling(
    open_page: Any, start: Callable[..., LiveServer]
) -> None:
    server = start("--api-key", "k").ready()
    page = open_page(server)
    page.goto(f"{server.url}/docs/")
    page.get_by_label("Key of this server").fill("k")
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".endpoint").first).to_contain_text("/v1/chat/completions")
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("live")
    page.get_by_role("link", name="API docs").click()
    page.locator(".endpoint").first.click()
    expect(page.locator(".endpoint pre").first).to_contain_text(f"curl {server.url}/v1/chat/completions")
    expect(page.get_by_text("seed", exact=True).locator("..")).to_contain_text("< 9223372036854775808")
    page.get_by_label("Filter").fill("live_stats")
    expect(page.locator(".endpoint:visible")).to_have_count(1)


def test_a_server_that_falls_silent_is_not_shown_as_live(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    page.clock.install()
    page.reload()
    expect(page.locator("#status")).to_have_text("live")
    server.send(signal.SIGSTOP)
    try:
        page.clock.fast_forward("00:10")
        expect(page.locator("#status")).to_have_text("reconnecting")
    finally:
        server.send(signal.SIGCONT)
    page.clock.fast_forward("00:10")
    expect(page.locator("#status")).to_have_text("live")


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
        for part in ("body", ".bar", "#model", "#glance", "#turns", "#engine"):
            assert_fits(page, part)
    page.goto(f"{server.url}/docs")
    page.locator(".endpoint").first.click()
    page.locator("details details").evaluate_all("(nodes) => nodes.forEach((node) => (node.open = true))")
    expect(page.locator("details details .field").first).to_be_visible()
    assert_fits(page, "html")


def assert_fits(page: Any, part: str) -> None:
    """Nothing in a part of the page is cut or has to be scrolled sideways."""
    box = page.locator(part).evaluate("(node) => [node.scrollWidth, node.clientWidth]")
    assert box[0] <= box[1], f"{part} is {box[0]} pixels wide, of which {box[1]} are seen"


def test_every_control_has_a_name_and_can_be_reached_by_keyboard(open_page: Any, server: LiveServer) -> None:
    page = open_page(server)
    page.get_by_role("button", name="Settings").click()
    names = page.locator("button, input, textarea, a, progress, canvas, svg").evaluate_all(
        "(nodes) => nodes.map((node) => node.ariaLabel || node.labels?.[0]?.textContent || node.textContent)"
    )
    assert all(name.strip() for name in names), names
    page.get_by_label("Message", exact=True).focus()
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.name || document.activeElement.textContent"))
    assert {"Settings", "New chat", "Send", "temperature", "seed", "tools"} <= reached
