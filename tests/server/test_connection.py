"""What one connection writes, and what the requests on it learn."""

import asyncio
import re
import socket
from typing import Any

import pytest
from hypercorn.config import Config

from server.connection import STATE, Connection, answer, chunk_connection
from server.connections import Connections
from server.watch import STATE as WATCH
from server.watch import ClientGone, Watch


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
        connection = Connection(Connections(app, Config()), reader, writer, is_over_limit=False)
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
