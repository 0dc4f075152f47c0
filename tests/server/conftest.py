"""An application in this process over ASGI, and live servers as processes of their own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.app import build_app
from server.config import ServerConfig
from tests.server.fake_engine import FakeEngine
from tests.server.tool_chat import THINKING

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def engine() -> FakeEngine:
    """A fresh engine."""
    return FakeEngine()


def client_for(engine: FakeEngine | None, **settings: object) -> httpx.AsyncClient:
    """A client of an application around `engine`, without a network."""
    app = build_app(engine, ServerConfig(**settings))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the default application."""
    async with client_for(engine) as found:
        yield found


@pytest.fixture
def calls_and_thinks(engine: FakeEngine) -> None:
    """The model of `engine` thinks first and calls tools in Hermes' format."""
    engine.tokenizer.chat_template = THINKING


@pytest.fixture
async def thinker(calls_and_thinks: None, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application around such an engine."""
    async with client_for(engine) as found:
        yield found


@pytest.fixture
async def openai_client(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of the default application."""
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://test/v1", http_client=client_for(engine), max_retries=0
    ) as found:
        yield found


class LiveServer:
    """`monoloop serve` with a FakeEngine, on a free port of loopback."""

    module = "tests.server.serve_fake"

    def __init__(self, *flags: str, **variables: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **variables,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", self.module, "serve", "--port", "0", *flags],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        # One client, since each loads the machine's certificates; without keep-alive, to hold up no drain.
        self._http = httpx.Client(verify=False, headers={"connection": "close"}, timeout=30, trust_env=False)
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()

    @property
    def log(self) -> str:
        """Everything it has said."""
        return "".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = 20) -> re.Match[str]:
        """Wait until it says something that matches."""
        deadline = time.monotonic() + seconds
        with self._news:
            while not (found := re.search(pattern, self.log)):
                assert time.monotonic() < deadline, f"{pattern!r} did not come:\n{self.log}"
                assert self.process.poll() is None, (
                    f"the server ended with {self.process.returncode}:\n{self.log}"
                )
                self._news.wait(0.1)
        return found

    @property
    def url(self) -> str:
        """Its address, once it is known."""
        return self.wait_for(r"(https?://[\w.\[\]:]+)")[1]

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.url.rsplit(":", 1)[1])

    def ready(self) -> "LiveServer":
        """Wait until the model is there."""
        self.wait_for("is ready after")
        return self

    def get(self, path: str, **options: Any) -> httpx.Response:
        """A GET."""
        return self._http.get(self.url + path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """A POST."""
        return self._http.post(self.url + path, **options)

    def wait_until_idle(self, seconds: float = 20) -> None:
        """Wait until no request is left: each was ended, whatever its client did."""
        deadline = time.monotonic() + seconds
        while (load := self.get("/load").json())["server_load"] or load["running"] or load["pages_used"]:
            assert time.monotonic() < deadline, f"requests are left, {load}:\n{self.log}"
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def exit_code(self, seconds: float = 20) -> int:
        """Wait for its end."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end:\n{self.log}") from None
        self._reader.join(5)
        return code

    def close(self) -> None:
        """End it, however it feels."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._http.close()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """One server for the tests of a module."""
    server = LiveServer(
        "--max-body-bytes", "2000000", "--body-timeout-seconds", "1.5", "--send-timeout-seconds", "1"
    ).ready()
    yield server
    server.close()
    assert "Traceback" not in server.log, server.log


@pytest.fixture
def start() -> Iterator[Callable[..., LiveServer]]:
    """Starts servers that end with the test."""
    servers: list[LiveServer] = []

    def start_one(*flags: str, **variables: str) -> LiveServer:
        servers.append(LiveServer(*flags, **variables))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()
