"""Start and end of the process: loading, drain, signals, death of the engine, what cannot start."""

import asyncio
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config import ServerConfig
from server.context import ServerContext
from server.lifecycle import (
    ONE_SIGNAL_SECONDS,
    Server,
    loop_factory,
    tasks_end,
    threads_end,
    warn_if_open,
)
from server.listener import bind
from server.metrics import Metrics
from server.settings import parse
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine

Start = Callable[..., LiveServer]


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


class Reader(threading.Thread):
    """Reads a streamed answer in the background."""

    def __init__(self, live: LiveServer, content: str) -> None:
        super().__init__(daemon=True)
        self.url, self.content = live.url, content
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.start()
        assert self.begun.wait(10), live.log

    def run(self) -> None:
        body = {"messages": user(self.content), "stream": True, "max_tokens": 4000}
        url = f"{self.url}/v1/chat/completions"
        with (
            suppress(httpx.TransportError),
            httpx.Client(verify=False, timeout=30) as client,
            client.stream("POST", url, json=body) as response,
        ):
            for line in response.iter_lines():
                self.lines.append(line)
                if "t0" in line:
                    self.begun.set()

    def data(self) -> list[str]:
        """All events, once the stream has ended."""
        self.join(20)
        assert not self.is_alive(), "the stream did not end"
        return [line.removeprefix("data: ") for line in self.lines if line]


def error_of(event: str) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(event)["error"]
    return error


def test_answers_probes_while_the_model_loads(start: Start, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    live = start(FAKE_LOADED=str(loaded))
    live.wait_for("found fake-model; until it is loaded, http://.* answers 503")
    assert live.get("/health").status_code == 200
    ready = live.get("/ready")
    assert ready.status_code == 503
    assert "retry-after" in ready.headers
    response = live.post("/v1/chat/completions", json={"messages": user("hi")})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_is_overloaded")
    assert live.get("/v1/models").status_code == 503
    assert live.get("/metrics").status_code == 200
    loaded.touch()
    live.ready()
    assert live.get("/ready").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_lets_streams_finish(start: Start, number: signal.Signals) -> None:
    live = start().ready()
    reader = Reader(live, "tokens=100 delay=0.03")  # runs longer than the requests below take
    live.send(number)
    live.wait_for("finishing what runs")
    assert live.get("/health").status_code == 200
    assert live.get("/ready").status_code == 503
    refused = live.post("/v1/chat/completions", json={"messages": user("hi")})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_shutting_down")
    assert refused.headers["retry-after"] == "5"
    data = reader.data()
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "stop"
    assert live.exit_code() == 0
    assert "Traceback" not in live.log, live.log


def test_idle_connections_do_not_hold_the_end_up(start: Start) -> None:
    live = start().ready()
    with (
        httpx.Client(verify=False) as client,
        socket.create_connection(("127.0.0.1", live.port)) as half_sent,
    ):
        client.get(f"{live.url}/health")
        half_sent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        live.send(signal.SIGTERM)
        assert live.exit_code() == 0
    assert "still open" not in live.log


def test_a_body_that_is_owed_does_not_hold_the_end_up(start: Start) -> None:
    live = start().ready()
    with socket.create_connection(("127.0.0.1", live.port)) as owing:
        owing.settimeout(10)
        owing.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
        )
        assert owing.recv(1000).startswith(b"HTTP/1.1 100 "), "its body is waited for"
        owing.sendall(b"{")
        live.send(signal.SIGTERM)
        assert owing.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert live.exit_code() == 0
    assert "still open" not in live.log
    assert "Exception in callback" not in live.log


def test_what_outlives_the_drain_ends_with_an_error(start: Start) -> None:
    live = start("--drain-timeout-seconds", "0.2").ready()
    reader = Reader(live, "tokens=4000 delay=0.02")
    live.send(signal.SIGTERM)
    data = reader.data()
    assert data[-1] == "[DONE]"
    assert error_of(data[-2])["code"] == "server_is_shutting_down"
    assert live.exit_code() == 0


def test_second_signal_ends_at_once(start: Start) -> None:
    live = start().ready()
    Reader(live, "tokens=4000 delay=0.02")
    live.send(signal.SIGTERM)
    live.wait_for("finishing what runs")
    time.sleep(ONE_SIGNAL_SECONDS)
    live.send(signal.SIGINT)
    assert live.exit_code() == 128 + signal.SIGINT


def test_two_signals_in_quick_succession_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now, codes = 100.0, []
    monkeypatch.setattr("server.lifecycle.time.monotonic", lambda: now)
    monkeypatch.setattr("server.lifecycle.exit_now", codes.append)
    with bind("127.0.0.1", 0) as listener:
        server = Server(parse(["--port", "0"]), listener)
        server.on_signal(signal.SIGTERM)
        now += ONE_SIGNAL_SECONDS
        server.on_signal(signal.SIGTERM)
        assert server.stop_requested.is_set()
        assert not codes
        now += 0.1
        server.on_signal(signal.SIGTERM)
    assert codes == [128 + signal.SIGTERM]


def test_the_example_request_shows_the_models_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.model.generation_defaults.update(temperature=0.2, top_p=0.9, max_new_tokens=7)
    context = ServerContext(ServerConfig(), Metrics())
    context.attach(engine)  # type: ignore[arg-type]
    with bind("127.0.0.1", 0) as listener:
        server = Server(parse(["--port", "0"]), listener)
        server.announce(context, 1.0)
    body = json.loads(capsys.readouterr().err.split("-d '")[1].rstrip("'\n"))
    assert body.pop("messages")
    assert body == {"temperature": 0.2, "top_p": 0.9, "stream": True}


def test_signal_while_loading_ends_at_once(start: Start, tmp_path: Path) -> None:
    live = start(FAKE_LOADED=str(tmp_path / "never"))
    live.get("/health")
    live.send(signal.SIGTERM)
    assert live.exit_code() == 0


def test_death_of_the_engine_ends_streams_and_process(start: Start) -> None:
    live = start().ready()
    reader = Reader(live, "tokens=4000 delay=0.02")
    body = {"messages": user("die=1")}
    response = live.post("/v1/chat/completions", json=body)
    assert response.status_code == 503
    data = reader.data()
    assert data[-1] == "[DONE]"
    assert error_of(data[-2])["message"] == "The engine has stopped after a fault."
    assert live.exit_code() == 1
    assert "Traceback" not in live.log, live.log


def test_model_that_cannot_be_found_ends_the_start(start: Start) -> None:
    live = start("--model", "missing")
    assert live.exit_code() == 2
    assert "error: --model: there is no model called missing" in live.log
    assert "http://" not in live.log, "the address was shown before the model was found"
    assert "Traceback" not in live.log, live.log


def test_model_that_cannot_be_fetched_is_no_wrong_setting(start: Start) -> None:
    live = start("--model", "far")
    assert live.exit_code() == 1
    assert "error: far could not be fetched" in live.log
    assert "Traceback" not in live.log, live.log


def test_setting_the_model_cannot_meet_is_named(start: Start) -> None:
    live = start("--max-model-len", "1")
    assert live.exit_code() == 2
    assert "error: --max-model-len: 1 is too little; raise --kv-tokens" in live.log
    assert "Traceback" not in live.log, live.log


def test_port_in_use_is_named(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        live = start("--port", port)
        assert live.exit_code() == 2
    assert f"--port {port}" in live.log
    assert "in use" in live.log
    assert "Traceback" not in live.log, live.log


def test_warns_of_an_open_door(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        warn_if_open(ServerConfig(host=host))
    warn_if_open(ServerConfig(host="0.0.0.0", api_key=("k",)))  # type: ignore[arg-type]
    assert not caplog.records
    warn_if_open(ServerConfig(host="0.0.0.0"))
    assert "WITHOUT an API key" in caplog.text


def test_uvloop_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    uvloop = pytest.importorskip("uvloop")
    assert loop_factory(ServerConfig()) is uvloop.new_event_loop
    assert loop_factory(ServerConfig(uvloop=False)) is None
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory(ServerConfig()) is None


def test_a_thread_that_goes_on_for_nobody_is_not_waited_for() -> None:
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    assert not threads_end(0.01)
    may_end.set()
    assert threads_end(10)
    assert not thread.is_alive()


async def test_waits_only_for_tasks_that_end() -> None:
    may_end = asyncio.Event()

    async def go_on() -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    tasks = [asyncio.create_task(go_on()), asyncio.create_task(asyncio.sleep(1000))]
    await asyncio.sleep(0)
    assert not await tasks_end(0.01)
    may_end.set()
    assert await tasks_end(10)
    assert all(task.done() for task in tasks)
