"""Bytes after a request in HTTP/1.1, and clients that leave, on asyncio's loop and on uvloop."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hypercorn.config import Config

from server import http1
from server.connection import chunk_connection
from server.connections import Connections
from server.http1 import MAX_EARLY_BYTES, Http1
from server.watch import STATE as WATCH
from server.watch import ClientGone, SlowClient, Watch

Run = Callable[[Coroutine[Any, Any, None]], None]
POST = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\n{}"
UPGRADE = POST.replace(b"Host", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHost")
RESET = struct.pack("ii", 1, 0)
EARLY = {
    "nothing": b"",
    "line end": b"\r\n",
    "request": POST,
    "half a request": POST[:20],
    "garbage": b"\0\1\r\n\r\n",
    "much": b"a" * (3 * MAX_EARLY_BYTES),
}


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test on one of both loops."""

    def run_on(test: Coroutine[Any, Any, None]) -> None:
        async def in_time() -> None:
            async with asyncio.timeout(20):
                await test

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(in_time())

    return run_on


@asynccontextmanager
async def serving(app: Any, send_timeout_seconds: float = 60) -> AsyncIterator[Callable[[], socket.socket]]:
    """Serve an application; yields what connects to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, ended, config = listener.getsockname(), asyncio.Event(), Config()
    config.graceful_timeout = 0.05
    server = asyncio.create_task(Connections(app, config, send_timeout_seconds).serve(listener, ended))

    def connect() -> socket.socket:
        peer = socket.create_connection(address)
        peer.setblocking(False)
        return peer

    yield connect
    ended.set()
    await server


async def received(peer: socket.socket, end: bytes = b"") -> bytes:
    """All that comes up to `end`, or until the connection is closed."""
    data = b""
    while (not end or end not in data) and (more := await asyncio.get_running_loop().sock_recv(peer, 2**16)):
        data += more
    return data


class Waits:
    """An application that begins a response, and learns that its client has left."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.has_left = asyncio.Event()
        self.connection: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        watch: Watch = scope["state"][WATCH]
        watch.begin(receive, None)
        self.connection = chunk_connection(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.connection.send_chunk(b"first")
        self.has_begun.set()
        try:
            with watch:
                await asyncio.Event().wait()
        except ClientGone:
            self.has_left.set()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body, a turn of the loop later."""
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    await asyncio.sleep(0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("comes", ["with the request", "later"])
@pytest.mark.parametrize("early", EARLY)
def test_departure_is_noticed_whatever_came_before(run: Run, early: str, comes: str, resets: bool) -> None:
    async def leave() -> None:
        app, loop = Waits(), asyncio.get_running_loop()
        async with serving(app) as connect:
            peer = connect()
            with_request = comes == "with the request"
            await loop.sock_sendall(peer, UPGRADE + EARLY[early] if with_request else POST)
            await app.has_begun.wait()
            if not with_request:
                await loop.sock_sendall(peer, EARLY[early])
            await received(peer, b"first")
            if resets:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            peer.close()
            await app.has_left.wait()

    run(leave())


def test_nothing_is_written_to_a_client_that_has_left(run: Run) -> None:
    async def write_on() -> None:
        app = Waits()
        async with serving(app) as connect:
            peer = connect()
            peer.sendall(POST)
            await app.has_begun.wait()
            connection, written = app.connection, []
            peer.close()
            await app.has_left.wait()

            class Transport:
                def __getattr__(self, name: str) -> Any:
                    return getattr(transport, name)

                def write(self, data: bytes) -> None:
                    written.append(data)

            transport, connection._transport = connection._transport, Transport()
            for _ in range(3):
                connection.write_chunk(b"more")
                await asyncio.sleep(0)
        assert not written

    run(write_on())


def test_early_requests_are_answered_in_order(run: Run) -> None:
    async def pipeline() -> None:
        loop = asyncio.get_running_loop()
        async with serving(echo) as connect:
            with connect() as peer:
                requests = [POST.replace(b"{}", b"%02d" % number) for number in range(20)]
                requests[-1] = requests[-1].replace(b"Host", b"Connection: close\r\nHost")
                data = b"\r\n".join(requests)
                for first in range(0, len(data), 101):
                    await loop.sock_sendall(peer, data[first : first + 101])
                    await asyncio.sleep(0)
                answers = await received(peer)
        bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers.split(b"HTTP/1.1 200 ")[1:]]
        assert bodies == [b"%02d" % number for number in range(20)], answers

    run(pipeline())


def test_line_ends_around_requests_are_no_requests(run: Run) -> None:
    async def ask() -> None:
        loop = asyncio.get_running_loop()
        async with serving(echo) as connect:
            for version, header in ((b"1.0", b""), (b"1.1", b"Connection: close\r\n")):
                with connect() as peer:
                    request = POST.replace(b"1.1", version).replace(b"Host", header + b"Host")
                    await loop.sock_sendall(peer, b"\r\n" + request + b"\r\n")
                    answer = await received(peer)
                assert answer.startswith(b"HTTP/1.1 200 "), answer
                assert answer.endswith(b"\r\n\r\n{}"), answer

    run(ask())


def test_connection_with_too_many_early_bytes_is_closed_after_the_answer(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        has_dropped, keep = asyncio.Event(), Http1._keep

        def keep_and_tell(http: Http1, data: bytes) -> None:
            keep(http, data)
            if http._has_dropped:
                has_dropped.set()

        monkeypatch.setattr(Http1, "_keep", keep_and_tell)
        monkeypatch.setattr(http1, "LINGER_SECONDS", 0.2)

        async def answer_later(*parts: Any) -> None:
            await has_dropped.wait()
            await echo(*parts)

        async with serving(answer_later) as connect:
            with connect() as peer:
                requests = POST * (2 + MAX_EARLY_BYTES // len(POST))
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(peer, POST)
                await loop.sock_sendall(peer, requests)
                assert (await received(peer)).count(b"HTTP/1.1 200 ") == 1

    run(ask())


def test_client_that_sends_no_more_gets_its_answer(run: Run) -> None:
    async def ask() -> None:
        async with serving(echo) as connect:
            with connect() as peer:
                await asyncio.get_running_loop().sock_sendall(peer, POST)
                peer.shutdown(socket.SHUT_WR)
                assert (await received(peer)).endswith(b"\r\n\r\n{}")

    run(ask())


class Floods:
    """Sends more than a client that does not read can be sent: in one piece, or in chunks."""

    def __init__(self, *, in_chunks: bool) -> None:
        self.in_chunks = in_chunks
        self.has_begun = asyncio.Event()
        self.transport: Any = None
        self.watch: Watch
        self.error: ClientGone | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.watch = scope["state"][WATCH]
        self.watch.begin(receive, None)
        connection: Any = chunk_connection(scope)
        self.transport = connection._transport
        length = [] if self.in_chunks else [(b"content-length", b"%d" % LARGE)]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        self.has_begun.set()
        try:
            with self.watch:
                while self.in_chunks:
                    await connection.send_chunk(b"a" * 2**20)
                    await asyncio.sleep(0)  # it is written between turns of the loop
            await send({"type": "http.response.body", "body": b"a" * LARGE, "more_body": False})
        except ClientGone as error:
            self.error = error


LARGE = 2**25  # bytes, more than the kernel takes for a connection


@pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "chunks"])
def test_client_that_reads_nothing_is_cut(run: Run, in_chunks: bool) -> None:
    async def read_nothing() -> None:
        app = Floods(in_chunks=in_chunks)
        async with serving(app, send_timeout_seconds=0.05) as connect:
            with connect() as peer:
                await asyncio.get_running_loop().sock_sendall(peer, POST)
                await app.has_begun.wait()
                while not app.transport.is_closing():  # noqa: ASYNC110 - no event says it
                    await asyncio.sleep(0.01)
                assert len(await received(peer)) < LARGE
                assert isinstance(app.error, SlowClient) is in_chunks, "the whole has been written"
                assert not app.transport.get_write_buffer_size()

    run(read_nothing())


@pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "chunks"])
def test_server_that_ends_waits_for_no_client_that_reads_nothing(run: Run, in_chunks: bool) -> None:
    async def end() -> None:
        app = Floods(in_chunks=in_chunks)
        async with serving(app) as connect:
            peer = connect()
            await asyncio.get_running_loop().sock_sendall(peer, POST)
            await app.has_begun.wait()
        assert app.transport.is_closing()
        peer.close()

    run(end())
