"""Connections of real sockets, to a server that may have few files open."""

import asyncio
import json
import os
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypercorn.config import Config

from server import connections, file_limit
from server.connections import Connections
from tests.server.conftest import LiveServer

MAX_FILES = 128
NUM_USABLE = 96  # the rest is reserved
KEEP_ALIVE_SECONDS = 65
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")


@pytest.fixture
def cramped(start: Callable[..., LiveServer]) -> LiveServer:
    """A server that may have MAX_FILES files open."""
    server = start("--keep-alive-seconds", str(KEEP_ALIVE_SECONDS)).ready()
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    num_files_before = num_files(server)
    peer, _ = ask(server)
    peer.close()
    wait_for_files(server, num_files_before + 1)  # libuv opens one with the first connection
    return server


@pytest.fixture
def peers() -> Iterator[ExitStack]:
    """Closes what is entered at the end of the test."""
    with ExitStack() as stack:
        yield stack


def num_files(server: LiveServer) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def wait_for_files(server: LiveServer, most: int) -> None:
    """Wait until the server has `most` files open at most, much shorter than it keeps idle connections."""
    deadline = time.monotonic() + KEEP_ALIVE_SECONDS / 3
    while num_files(server) > most:
        assert time.monotonic() < deadline, (
            f"{num_files(server)} files are open, {most} at most were expected"
        )
        time.sleep(0.02)


def ask(server: LiveServer, path: str = "/health") -> tuple[socket.socket, int]:
    """Send a GET and return the connection, left open, and the status; 0 if it was closed without one."""
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    try:
        peer.sendall(f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
        head = peer.recv(65536)
    except ConnectionError:
        head = b""
    return peer, status_of(head) if head else 0


def status_of(head: bytes) -> int:
    return int(head.split()[1])


def send_stream(server: LiveServer) -> socket.socket:
    """Ask for a long stream and return the connection."""
    prompt = "tokens=4000 delay=0.1"
    body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": True}).encode()
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    peer.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return peer


def begin_stream(server: LiveServer) -> tuple[socket.socket, int]:
    """Begin a long stream and return its connection and status."""
    peer = send_stream(server)
    return peer, status_of(peer.recv(65536))


@linux_only
def test_a_connection_is_closed_when_its_client_closes_it(cramped: LiveServer) -> None:
    before = num_files(cramped)
    for _ in range(2 * MAX_FILES):
        peer, status = ask(cramped)
        peer.close()
        assert status == 200
    wait_for_files(cramped, before)


@linux_only
def test_a_burst_beyond_the_limit_is_refused_and_not_cut_off(cramped: LiveServer, peers: ExitStack) -> None:
    peers.callback(cramped.send, signal.SIGCONT)
    cramped.send(signal.SIGSTOP)  # so that all of them wait when it looks again
    opened = [peers.enter_context(send_stream(cramped)) for _ in range(2 * MAX_FILES)]
    cramped.send(signal.SIGCONT)
    heads = [peer.recv(65536) for peer in opened]
    statuses = Counter(status_of(head) for head in heads)
    assert set(statuses) == {200, 503}, statuses
    assert statuses[200] > NUM_USABLE / 2, statuses
    assert all(b"\r\nretry-after: " in head.lower() for head in heads if status_of(head) == 503)


@linux_only
def test_idle_connections_make_room_for_new_ones(cramped: LiveServer, peers: ExitStack) -> None:
    opened = []
    for _ in range(2 * MAX_FILES):
        peer, status = ask(cramped)
        opened.append(peers.enter_context(peer))
        assert status == 200
        assert num_files(cramped) < MAX_FILES
    for peer in opened[:MAX_FILES]:
        assert peer.recv(1) == b"", "the longest idle connections are closed"
    opened[-1].sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
    assert opened[-1].recv(65536).startswith(b"HTTP/1.1 200"), "the last one is still open"
    assert cramped.log.count("of the 128 files that may be open") == 1


@linux_only
def test_without_idle_connections_requests_are_refused_and_probes_answered(
    cramped: LiveServer, peers: ExitStack
) -> None:
    before = num_files(cramped)
    statuses = []
    for _ in range(MAX_FILES):
        peer, status = begin_stream(cramped)
        peers.enter_context(peer)
        statuses.append(status)
        if status == 503:
            break
    assert statuses == [200] * (NUM_USABLE - before) + [503]
    for path, expected in (("/health", 200), ("/v1/models", 503)):
        peer, status = ask(cramped, path)
        assert status == expected, path
        peer.close()
    peers.close()
    wait_for_files(cramped, before)
    peer, status = begin_stream(cramped)
    peer.close()
    assert status == 200


def test_a_refused_limit_does_not_end_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        asked.append(limits[0])
        if limits[0] > largest:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    largest = 10_240
    file_limit.raise_file_limit()
    assert asked == [65_536, 10_240]
    assert not caplog.records
    largest = 0
    file_limit.raise_file_limit()
    assert "refuses more than 256 open files" in caplog.text
    assert file_limit.file_limit() == 256


async def test_requests_that_do_not_end_do_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CUT_SECONDS", 0.01)
    has_begun, may_end, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def goes_on(scope: Any, receive: Any, send: Any) -> None:
        has_begun.set()
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue
        has_ended.set()

    config = Config()
    config.graceful_timeout = 0.01
    listener = socket.create_server(("127.0.0.1", 0))
    ended = asyncio.Event()
    serving = asyncio.create_task(Connections(goes_on, config).serve(listener, ended))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
    async with asyncio.timeout(20):
        await has_begun.wait()
        ended.set()
        await serving
        may_end.set()
        await has_ended.wait()
        await reader.read()
    writer.close()
