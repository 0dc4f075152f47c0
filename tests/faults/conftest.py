"""Servers of the toy model, and clients that are there when a fault happens."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.server.conftest import LiveServer


class ToyServer(LiveServer):
    """`monoloop serve` with the toy model."""

    module = "tests.faults.serve_toy"


@pytest.fixture
def start() -> Iterator[Any]:
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
            suppress(httpx.TransportError),  # it may be killed
            httpx.Client(verify=False, timeout=60, trust_env=False) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body(1, 5000, stream=True)) as response,
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
