"""Connections of real sockets, to a server that may have few files open."""

import asyncio
import json
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from server import connections, file_limit
from server.connections import STATE, Connection, Connections, answer, chunk_connection
from server.watch import STATE as WATCH
from server.watch import ClientGone, Watch
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
    return peer, int(head.split()[1]) if head else 0


def begin_stream(server: LiveServer) -> tuple[socket.socket, int]:
    """Begin a long stream and return its connection and status; 0 if it was closed without one."""
    prompt = "tokens=4000 delay=0.1"
    body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": True}).encode()
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    try:
        peer.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        head = peer.recv(65536)
    except ConnectionError:
        head = b""
    return peer, int(head.split()[1]) if head else 0


@linux_only
def test_a_connection_is_closed_when_its_client_closes_it(cramped: LiveServer) -> None:
    before = num_files(cramped)
    for _ in range(2 * MAX_FILES):
        peer, status = ask(cramped)
        peer.close()
        assert status == 200
    wait_for_files(cramped, before)


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


async def writes_of(app: Any, end: bytes = b"0\r\n\r\n") -> list[bytes]:
    """What a connection writes, call by call, to answer a request with an application, up to `end`."""
    ours, peer = socket.socketpair()
    with peer:
        reader, writer = await asyncio.open_connection(sock=ours)
        written: list[bytes] = []
        has_ended = asyncio.Event()

        def write(data: bytes) -> None:
            written.append(data)
            if data.endswith(end):
                has_ended.set()

        transport: Any = writer.transport
        transport.write = write
        all_connections = Connections(app, Config())
        connection = Connection(
            all_connections, app, Config(), WorkerContext(None), reader, writer, is_over_limit=False
        )
        peer.sendall(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        serving = asyncio.create_task(connection.run())
        async with asyncio.timeout(20):
            await has_ended.wait()
        peer.shutdown(socket.SHUT_WR)
        await serving
        writer.close()
    return written


async def test_chunks_leave_with_the_head_and_with_the_end() -> None:
    async def streams(scope: Any, receive: Any, send: Any) -> None:
        connection = chunk_connection(scope)
        assert connection is not None
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await connection.send_chunk(b"first")
        await asyncio.sleep(0)
        await connection.send_chunk(b"second")
        await connection.send_chunk(b"third")
        await asyncio.sleep(0)
        await connection.send_chunk(b"last")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    first, second, last = await writes_of(streams)
    assert first.startswith(b"HTTP/1.1 200 \r\n")
    assert first.endswith(b"\r\n\r\n5\r\nfirst\r\n")
    assert second == b"6\r\nsecond\r\n5\r\nthird\r\n"
    assert last == b"4\r\nlast\r\n0\r\n\r\n"


async def test_chunks_are_those_of_hypercorn() -> None:
    async def sends(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        for body in (b"first", b"x" * 1000):
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def sends_chunks(scope: Any, receive: Any, send: Any) -> None:
        connection = chunk_connection(scope)
        assert connection is not None
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await connection.send_chunk(b"first")
        await connection.send_chunk(b"x" * 1000)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    one, *others = [
        re.sub(rb"date: [^\r]*", b"", b"".join(await writes_of(app))) for app in (sends, sends_chunks)
    ]
    assert others == [one]
    assert len(await writes_of(sends)) == 1, "what is sent in one turn of the loop leaves in one call"
    assert chunk_connection({"http_version": "2", "state": {STATE: object()}}) is None
    assert chunk_connection({"http_version": "1.1"}) is None


async def test_application_learns_that_its_client_has_left() -> None:
    left = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        watch: Watch = scope["state"][WATCH]
        watch.begin(receive, None)
        try:
            with watch:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"0\r\n\r\n", "more_body": True})
                await asyncio.Event().wait()
        except ClientGone:
            left.set()

    written = await writes_of(waits, end=b"0\r\n\r\n\r\n")  # its last chunk, not the end of the body
    assert len(written) == 1
    assert left.is_set()


async def test_failed_application_ends_its_connection_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a bug")

    [written] = await writes_of(fails, end=b"\r\n\r\n")
    assert written.startswith(b"HTTP/1.1 500 ")
    assert "a bug" in caplog.text


async def test_nothing_is_sent_on_a_connection_that_is_cut() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def is_cancelled_from_within(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    task = asyncio.create_task(answer(waits, None, None, send))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not sent
    await answer(is_cancelled_from_within, None, None, send)
    assert sent == [None], "the request has failed, and the client is answered"


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
