"""`monoloop batch`: a file of requests in, a file of results out, and what interrupts that.

Covers server/commands/batch.py and server/commands/batch_file.py.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.config import EngineConfig
from engine.errors import FetchFailed, ModelError, QueueFull
from server import cli, lifecycle
from server.commands import batch
from server.commands.batch_file import BatchFileError, Job, Results
from server.config import ServerConfig
from server.metrics import Metrics
from server.settings import Settings
from tests.server.conftest import ROOT
from tests.server.fake_engine import FakeEngine

Line = dict[str, Any]


def chat(custom_id: str, says: str, **body: Any) -> Line:
    """Return a line of a batch: a chat whose message tells the fake engine what to answer."""
    body = {"messages": [{"role": "user", "content": says}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The input."""
    return tmp_path / "in.jsonl"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The output."""
    return tmp_path / "out.jsonl"


def write(path: Path, *lines: Line | str) -> None:
    """Write lines, those that are text as they are."""
    path.write_text(
        "".join(f"{line if isinstance(line, str) else orjson.dumps(line).decode()}\n" for line in lines)
    )


def results(path: Path) -> list[Line]:
    """Return the lines of an output."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def texts(path: Path) -> dict[str, str]:
    """Return the answer to each chat."""
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in results(path)
        if line["response"] and line["response"]["status_code"] == 200
    }


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeEngine]]:
    """Fake engines, once they are started, of runs in this process."""
    started: list[FakeEngine] = []

    async def start(settings: Settings, metrics: Metrics, on_progress: Callable[[str], None]) -> FakeEngine:
        started.append(FakeEngine(EngineConfig(max_num_seqs=8), metrics))
        return started[-1]

    monkeypatch.setattr(lifecycle, "start_engine", start)
    monkeypatch.setattr(batch, "set_up_logging", lambda *_: None)
    for name in batch.NO_KEYS:  # of a server; a batch has no clients
        monkeypatch.setenv(f"MONOLOOP_{name.upper()}", "1")
    yield started
    assert all(engine.is_stopped for engine in started)


def run(source: Path, target: Path, *flags: str) -> int:
    """Run the command in this process."""
    return cli.main(["batch", str(source), str(target), *flags])


def test_each_endpoint_answers_in_the_format(engines: list[FakeEngine], source: Path, target: Path) -> None:
    chats = [chat(f"chat-{number}", f"say:{number}") for number in range(20)]
    completion = {"prompt": "tokens=2", "max_tokens": 5}
    embedding = {"input": ["a", "b"]}
    write(
        source,
        *chats,
        "",
        {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": completion},
        {"custom_id": "vector", "method": "POST", "url": "/v1/embeddings", "body": embedding},
    )
    assert run(source, target) == 0
    found = {line["custom_id"]: line for line in results(target)}
    assert len(found) == len(results(target)) == 22
    for line in found.values():
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["response"].keys() == {"status_code", "request_id", "body"}
        assert line["response"]["status_code"] == 200 and line["error"] is None
    assert found["chat-7"]["response"]["body"]["choices"][0]["message"]["content"] == "7"
    assert found["text"]["response"]["body"]["object"] == "text_completion"
    assert len(found["vector"]["response"]["body"]["data"]) == 2
    assert len({line["id"] for line in found.values()}) == 22


def test_bad_lines_become_errors_and_the_rest_is_answered(
    engines: list[FakeEngine], source: Path, target: Path
) -> None:
    good = chat("good", "say:yes")
    bad = [
        ("no JSON", None, "is not JSON"),
        ("[1]", None, "not a JSON object"),
        ({**good, "custom_id": 3}, None, "custom_id must be text"),
        ({**good, "custom_id": "get", "method": "GET"}, "get", "method must be POST, not 'GET'"),
        ({**good, "custom_id": "url", "url": "/metrics"}, "url", "url must be one of /v1/"),
        ({**good, "custom_id": "body", "body": "x"}, "body", "body must be an object"),
        (chat("stream", "x", stream=True), "stream", "cannot be streamed"),
        (good, None, "'good' is that of an earlier line"),
    ]
    write(source, good, *(line for line, _, _ in bad), chat("refused", "x", max_tokens=-1))
    assert run(source, target) == 1
    found = results(target)
    errors = {line["error"]["line"]: line for line in found if line["error"]}
    assert list(errors) == list(range(2, 2 + len(bad)))
    for (_, custom_id, message), line in zip(bad, errors.values(), strict=True):
        assert line["custom_id"] == custom_id and line["response"] is None
        assert message in line["error"]["message"], line
    [refused] = [line for line in found if line["custom_id"] == "refused"]
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "max_tokens"
    assert texts(target) == {"good": "yes"}
    before = target.read_bytes()
    assert run(source, target) == 1, "the errors are still there"
    assert target.read_bytes() == before, "no line is answered, or refused, twice"
    assert len(engines) == 1, "no model is loaded where there is nothing to do"


def test_a_run_goes_on_where_the_last_one_stopped(
    engines: list[FakeEngine], source: Path, target: Path
) -> None:
    lines = [chat(f"{number}", f"say:{number}") for number in range(6)]
    write(source, *lines[:3])
    assert run(source, target) == 0
    whole = target.read_bytes()
    target.write_bytes(whole[:-40])  # the last result is torn
    write(source, *lines)
    assert run(source, target) == 0
    assert texts(target) == {f"{number}": f"{number}" for number in range(6)}
    assert len(engines[1].requests) == 4, "the torn one, and three that are new"


def earlier_results(target: Path) -> bytes:
    """Write a file with the result of request a; return what it holds."""
    earlier = Results(target)
    earlier.add_response(Job("a", "", b""), 200, "r", b"{}")
    earlier.close()
    return target.read_bytes()


@pytest.mark.parametrize("last", [b'{"id":"batch_req_1', b'{"id":"', b"\0\0\0\0\n", b"\0"])
def test_a_last_line_that_is_not_whole_is_dropped(target: Path, last: bytes) -> None:
    whole = earlier_results(target)
    target.write_bytes(whole + last)
    again = Results(target)
    assert (again.custom_ids, again.num_errors, target.read_bytes()) == ({"a"}, 0, whole)
    with pytest.raises(BatchFileError, match="another process writes to it"):
        Results(target)
    again.close()


def test_a_whole_result_without_a_line_break_is_kept(target: Path) -> None:
    whole = earlier_results(target)
    target.write_bytes(whole.rstrip())
    again = Results(target)
    again.close()
    assert (again.custom_ids, target.read_bytes()) == ({"a"}, whole)


@pytest.mark.parametrize(
    "content",
    [
        b"notes",
        b"notes\n",
        b'{"custom_id":"1","body":{}}',
        b"{}",
        b"\0\0",
        b"\x89PNG\r\n",
        b'{"custom_id": "a"',
    ],
)
def test_a_file_without_results_is_left_as_it_was(target: Path, content: bytes) -> None:
    for before in (b"", earlier_results(target) + content + b"\n"):
        target.write_bytes(before + content)
        with pytest.raises(BatchFileError, match="is no result of a batch; name another file"):
            Results(target)
        assert target.read_bytes() == before + content


def test_requests_that_can_be_read_only_once_are_refused(
    source: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(source)
    for pipe in (source, Path("/dev/null"), source.parent):
        assert run(pipe, target) == 2
        assert f"error: {pipe}: is no regular file" in capsys.readouterr().err
    for names in ((Path("-"), target), (source, Path("-"))):
        assert run(*names) == 2
        assert "error: -: neither stdin nor stdout can be used" in capsys.readouterr().err
    assert not target.exists() and not Path("-").exists()


def test_files_of_other_systems(
    engines: list[FakeEngine], source: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = orjson.dumps(chat("a", "say:fine"))
    source.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n")
    assert run(source, target) == 0
    assert texts(target) == {"a": "fine"}
    source.write_text(line.decode(), "utf-16")
    assert run(source, target) == 2
    assert f"error: {source}: is text in UTF-16; save it as UTF-8" in capsys.readouterr().err


def test_no_setting_of_keys_has_an_effect() -> None:
    assert {name for name in ServerConfig.model_fields if "key_" in name} - {"ssl_keyfile"} <= set(
        batch.NO_KEYS
    )


def test_the_documentation_lists_the_endpoints() -> None:
    documented = (ROOT / "docs" / "offline.md").read_text("utf-8")
    assert not [url for url in batch.URLS if f"`{url}`" not in documented]


def test_files_that_cannot_be_used(
    engines: list[FakeEngine], source: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(source, target) == 2
    assert f"error: {source}: cannot be read" in capsys.readouterr().err
    assert not target.exists()
    write(source, chat("a", "x"), chat("b", "x"))
    text = source.read_bytes()
    target.hardlink_to(source)
    for same in (source, target):
        assert run(source, same) == 2
        assert f"error: {same}: holds the requests" in capsys.readouterr().err
    assert source.read_bytes() == text, "it is left as it was"
    target.unlink()
    assert run(source, source.parent / "missing" / "out.jsonl") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert run(source, Path("/dev/null")) == 2
    assert "error: /dev/null: is no file" in capsys.readouterr().err
    assert run(source, target, "--concurrency", "0") == 2
    assert not engines


def test_no_more_than_the_given_number_run_at_once(
    engines: list[FakeEngine], source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    submit = FakeEngine.submit_group

    def counted(engine: FakeEngine, requests: Any) -> Any:
        nonlocal most
        streams = submit(engine, requests)
        most = max(most, len(engine.live))
        return streams

    monkeypatch.setattr(FakeEngine, "submit_group", counted)
    write(source, *(chat(f"{number}", "tokens=2 delay=0.001") for number in range(12)))
    assert run(source, target, "--concurrency", "3") == 0
    assert most == 3


def test_a_request_waits_while_the_engine_is_full(
    engines: list[FakeEngine], source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = FakeEngine.submit_group
    refusals = iter([QueueFull("full", 0), QueueFull("full", 0)])

    def sometimes(engine: FakeEngine, requests: Any) -> Any:
        for error in refusals:
            raise error
        return submit(engine, requests)

    monkeypatch.setattr(FakeEngine, "submit_group", sometimes)
    monkeypatch.setattr(batch.asyncio, "sleep", lambda seconds: _NOW)
    write(source, chat("a", "say:done"))
    assert run(source, target) == 0
    assert texts(target) == {"a": "done"}


class _Now:
    """Awaiting it takes no time."""

    def __await__(self) -> Iterator[None]:
        return iter(())


_NOW = _Now()


def test_a_dead_engine_ends_the_run_and_is_no_result(
    engines: list[FakeEngine], source: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(source, chat("a", "say:fine"), chat("b", "tokens=5 die=2"), chat("c", "say:never"))
    assert run(source, target, "--concurrency", "1") == 1
    assert texts(target) == {"a": "fine"}
    assert len(results(target)) == 1
    assert "the engine has stopped after a fault" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (FetchFailed("no network"), 1, "error: no network"),
        (ModelError("no such model"), 2, "error: --model: no such model"),
        (ValueError("max_model_len: too much"), 2, "error: --max-model-len: too much"),
    ],
)
def test_models_that_cannot_be_started(
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    message: str,
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(lifecycle, "start_engine", fail)
    monkeypatch.setattr(batch, "set_up_logging", lambda *_: None)
    write(source, chat("a", "x"))
    assert run(source, target) == code
    assert message in capsys.readouterr().err


def test_a_disk_that_is_full_ends_the_run(
    engines: list[FakeEngine],
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fill(results: Results) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, results._file.fileno())
        os.close(full)

    monkeypatch.setattr(Results, "_read", fill)
    write(source, chat("a", "say:fine"), chat("b", "hang"), chat("c", "hang"))
    assert run(source, target) == 1
    assert f"error: {target}: cannot be written (No space left on device)" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_done(source: Path, target: Path, number: signal.Signals) -> None:
    hanging = [chat(f"hangs-{index}", "hang") for index in range(3)]
    write(source, chat("a", "say:1"), *hanging, chat("b", "say:2"))
    command = [sys.executable, "-W", "error", "-m", "tests.server.serve_fake", "batch", source, target]
    with subprocess.Popen(
        [*map(str, command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 30
        while not target.exists() or target.read_bytes().count(b"\n") < 2:
            assert time.monotonic() < deadline and process.poll() is None, "there are no results"
            time.sleep(0.02)
        process.send_signal(number)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 128 + number, log
    assert texts(target) == {"a": "1", "b": "2"}
    assert len(results(target)) == 2, "what did not end has no result"
    assert "2 answers and 0 errors are written" in log and "answers the rest" in log, log
    assert "Traceback" not in log
