"""The log: lines for people, or JSON for machines."""

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from server.logs import JsonFormatter, LineFormatter, set_up_logging
from server.terminal import STATUS, fail, print_status
from tests.engine.toy_engine import toy_engine
from tests.server.conftest import LiveServer, client_for
from tests.server.fake_engine import MODEL_NAME, FakeEngine

HOSTILE = 'a "quote"\n\x1b[31m\u2028\x00\ud800 \\ {} 模型'


@pytest.fixture
def restored() -> Iterator[None]:
    """Put the log back as it was."""
    names = ("", "monoloop", STATUS.name)
    kept = [(logging.getLogger(name), [*logging.getLogger(name).handlers]) for name in names]
    ours = kept[1][0]
    level, propagate = ours.level, ours.propagate
    yield
    for logger, handlers in kept:
        logger.handlers = handlers
    ours.setLevel(level)
    ours.propagate = propagate
    STATUS.propagate = True
    logging.captureWarnings(False)


def record(message: str, *arguments: Any, **options: Any) -> logging.LogRecord:
    return logging.LogRecord(
        "monoloop.test", logging.INFO, __file__, 1, message, arguments, options.get("exc_info")
    )


def test_json_is_one_valid_line_whatever_the_message() -> None:
    line = JsonFormatter().format(record("%s", HOSTILE))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    found = json.loads(line)
    assert found["message"] == HOSTILE.replace("\ud800", "\\ud800")
    assert (found["level"], found["logger"]) == ("info", "monoloop.test")
    assert found["time"].endswith("+00:00")


@pytest.mark.parametrize("text", ["plain", HOSTILE])
def test_traceback_is_inside_the_object(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        entry = record("failed", exc_info=sys.exc_info())
    entry.stack_info = "Stack\n  frame"
    line = JsonFormatter().format(entry)
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == "failed"
    assert found["exception"].startswith("Traceback (most recent call last):\n")
    assert "ValueError: " in found["exception"]
    assert found["stack"] == "Stack\n  frame"


def test_line_is_one_line() -> None:
    assert len(LineFormatter("%(message)s").format(record("%s", HOSTILE)).splitlines()) == 1


def test_json_has_every_record(capsys: pytest.CaptureFixture[str], restored: None) -> None:
    set_up_logging("info", "json")
    logging.getLogger("monoloop.server").info("ours")
    logging.getLogger("monoloop.server").debug("below the level")
    logging.getLogger("some.library").warning("foreign")
    print_status("loading")
    assert fail("one\ntwo", 7) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", UserWarning, stacklevel=1)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    found = [(line["level"], line["message"].partition("\n")[0]) for line in lines]
    assert found[:5] == [
        ("info", "ours"),
        ("warning", "foreign"),
        ("info", "loading"),
        ("error", "error: one"),
        ("error", "error: two"),
    ]
    assert "careful" in found[5][1]


def test_status_lines_show_at_every_level(capsys: pytest.CaptureFixture[str], restored: None) -> None:
    set_up_logging("error", "json")
    print_status("ready")
    assert json.loads(capsys.readouterr().err)["message"] == "ready"


@pytest.mark.parametrize("stream", [True, False])
async def test_line_of_a_request_in_json(
    engine: FakeEngine, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="monoloop.access")
    engine.num_cached_tokens = 3
    body = {"messages": [{"role": "user", "content": "private tokens=4"}], "n": 2, "stream": stream}
    async with client_for(engine, api_key=("secret",)) as client:
        headers = {"x-request-id": "id-1", "authorization": "Bearer secret"}
        response = await client.post("/v1/chat/completions?key=hidden", json=body, headers=headers)
    line = JsonFormatter().format(caplog.records[-1])
    found = json.loads(line)
    assert isinstance(found.pop("seconds"), float)
    assert found.pop("id") in response.text
    del found["time"], found["message"]
    assert found == {
        "level": "info",
        "logger": "monoloop.access",
        "request_id": "id-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "model": MODEL_NAME,
        "prompt_tokens": 16,
        "cached_tokens": 3,
        "output_tokens": 8,
        "ttft_seconds": 0.0125,
        "itl_seconds": 0.0031,
        "ended": "stop",
    }
    assert not any(word in line for word in ("private", "secret", "hidden"))
    assert "16+8 tokens (3 cached) ttft=12ms itl=3.1ms ended=stop" in caplog.messages[-1]


async def test_request_without_tokens_has_no_times(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="monoloop.access")
    async with client_for(engine) as client:
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 99999})
        await client.get("/v1/models")
    refused, listed = (json.loads(JsonFormatter().format(entry)) for entry in caplog.records[-2:])
    assert (refused["status"], refused["ended"], refused["ttft_seconds"]) == (400, "error", None)
    assert (listed["status"], listed["path"]) == (200, "/v1/models")
    assert "ended" not in listed


async def test_times_come_from_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="monoloop.access")
    async with toy_engine() as engine, client_for(engine) as client:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "stream": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    found = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert (found["output_tokens"], found["ended"]) == (4, "length")
    assert 0 < found["ttft_seconds"] <= found["seconds"]
    assert 0 <= found["itl_seconds"] <= found["seconds"]


def test_log_of_a_server_is_json_from_the_first_line_to_the_last(start: Callable[..., LiveServer]) -> None:
    server = start("--log-format", "json").ready()
    assert server.post("/v1/completions", json={"prompt": "tokens=3"}).status_code == 200
    server.wait_for("/v1/completions")
    server.process.terminate()
    assert server.exit_code() == 0
    lines = [json.loads(line) for line in server.lines]
    assert {"monoloop.status", "monoloop.access"} <= {line["logger"] for line in lines}
