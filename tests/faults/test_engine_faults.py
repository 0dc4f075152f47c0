"""Faults of a running server: what its clients see, what its log says, and how the process ends."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.faults.serve_toy import FAULTY
from tests.server.conftest import LiveServer


class ToyServer(LiveServer):
    """`monoloop serve` with the toy model."""

    module = "tests.faults.serve_toy"


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts servers that end with the test."""
    servers: list[ToyServer] = []

    def start_one(*flags: str, **variables: str) -> ToyServer:
        servers.append(ToyServer(*flags, **variables))
        return servers[-1].ready()

    yield start_one
    for server in servers:
        server.close()


def body(first: int, max_tokens: int = 5, **fields: Any) -> dict[str, Any]:
    return {"prompt": [first, 1], "max_tokens": max_tokens, "seed": 7, "ignore_eos": True, **fields}


class Bystander(threading.Thread):
    """Streams a long answer while the fault happens."""

    def __init__(self, server: LiveServer) -> None:
        super().__init__(daemon=True)
        self.url = server.url
        self.has_begun = threading.Event()
        self.events: list[str] = []
        self.start()
        assert self.has_begun.wait(20), server.log

    def run(self) -> None:
        with (
            httpx.Client(verify=False, timeout=60, trust_env=False) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body(1, 900, stream=True)) as response,
        ):
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self.has_begun.set()

    def end(self) -> tuple[str, str]:
        """Return the last two events, once the stream has ended."""
        self.join(60)
        assert not self.is_alive(), "the stream did not end"
        return self.events[-2], self.events[-1]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("hang", "The device is stuck: it has made no progress for 1 s."),
        ("end", "The device thread has ended after a fault."),
        ("lose", "The device has failed: an illegal memory access was encountered"),
    ],
)
def test_what_no_step_survives_ends_the_server(serve: Any, fault: str, reason: str) -> None:
    server = serve("--watchdog-timeout-seconds", "1", FAULT=fault)
    bystander = Bystander(server)
    response = server.post("/v1/completions", json=body(FAULTY))
    assert (response.status_code, response.json()["error"]["message"]) == (503, reason)
    error, end = bystander.end()
    assert (json.loads(error)["error"]["message"], end) == (reason, "[DONE]")
    assert server.exit_code() == 1
    assert reason in server.log
    if fault == "hang":
        assert "in hang" in server.log, "the log does not show where the thread is"


def test_a_step_that_fails_ends_its_requests_alone(serve: Any) -> None:
    server = serve(FAULT="raise")
    sound = server.post("/v1/completions", json=body(1)).json()["choices"]
    response = server.post("/v1/completions", json=body(FAULTY))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "Computing this request failed."
    assert server.post("/v1/completions", json=body(1)).json()["choices"] == sound
    assert server.get("/health").status_code == 200
    assert "broken on purpose" in server.log
    assert server.get("/load").json()["pages_used"] == 0
