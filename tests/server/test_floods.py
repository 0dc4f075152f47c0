"""Clients that send slowly, too much, or too often: each is refused or bounded, and others are answered."""

import asyncio
import socket

import pytest
from h2.errors import ErrorCodes

from tests.server.conftest import LiveServer
from tests.server.test_http2 import App, Serving, Start, app, eventually, start

__all__ = ["app", "start"]  # fixtures

NUM_RESETS = 3000
SECONDS = 20
KEEP_ALIVE_SECONDS = 0.2


async def answered(serving: Serving) -> None:
    """Check that another client is answered."""
    other = await serving.connect()
    assert await other.answer(other.send("/echo", b"hi")) == (200, b"hi")


@pytest.mark.parametrize(
    "beginning",
    [b"", b"GET / HTTP/1.1\r\nX-A: ", b"POST /echo HTTP/1.1\r\nX-A: ", b"PRI * HTTP/2.0\r\n"],
    ids=["nothing", "GET", "POST", "HTTP/2"],
)
async def test_a_header_that_comes_byte_by_byte_ends(start: Start, beginning: bytes) -> None:
    serving = start()
    serving.connections._waiting._seconds = KEEP_ALIVE_SECONDS
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    writer.write(beginning)

    async def trickle() -> None:
        while beginning:
            writer.write(b"a")
            await asyncio.sleep(KEEP_ALIVE_SECONDS / 20)

    task = asyncio.create_task(trickle())
    try:
        async with asyncio.timeout(SECONDS):
            while await read(reader):
                pass
    finally:
        task.cancel()
        writer.close()
    serving.connections._waiting._seconds = SECONDS
    await answered(serving)


async def read(reader: asyncio.StreamReader) -> bytes:
    """Return what comes next, nothing at the end."""
    try:
        return await reader.read(65536)
    except ConnectionError:
        return b""


@pytest.mark.parametrize("line", [b"X-A: b\r\n", b"X-" + b"a" * 2000 + b": b\r\n", b"a"])
async def test_headers_without_end_are_refused(start: Start, line: bytes) -> None:
    serving = start()
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    writer.write(b"GET /echo HTTP/1.1\r\nHost: x\r\n")
    answer = asyncio.create_task(read(reader))
    num_sent = 0
    try:
        async with asyncio.timeout(SECONDS):
            while not answer.done():
                writer.write(line * 100)
                num_sent += 100 * len(line)
                await asyncio.sleep(0)
    finally:
        writer.close()
    assert (await answer)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b""), num_sent
    await answered(serving)


async def test_headers_of_http2_without_end_are_refused(start: Start) -> None:
    serving = start()
    client = await serving.connect()
    client.writer.write(b"\0\0\0\1\0\0\0\0\1")  # HEADERS
    for _ in range(5000):
        client.writer.write(b"\0\4\0\x09\0\0\0\0\1" + b"\0" * 1024)  # CONTINUATION
    await client.until_closed()
    await answered(serving)


async def test_large_headers_of_http2_are_refused(start: Start) -> None:
    serving = start()
    client = await serving.connect()
    number = client.frames.get_next_available_stream_id()
    fields = [(":method", "GET"), (":path", "/echo"), (":scheme", "http"), (":authority", "x")]
    client.frames.send_headers(
        number, [*fields, *((f"x-{count}", "y" * 1000) for count in range(200))], end_stream=True
    )
    client.flush()
    await client.until_closed()
    await answered(serving)


async def test_streams_that_are_reset_at_once_end_at_once(start: Start, app: App) -> None:
    serving = start()
    client = await serving.connect()
    most_tasks = 0

    async def watch() -> None:
        nonlocal most_tasks
        while True:
            most_tasks = max(most_tasks, len(asyncio.all_tasks()))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    for _ in range(NUM_RESETS):
        client.frames.reset_stream(client.begin("/echo", end=False), ErrorCodes.CANCEL)
    client.flush()
    await answered(serving)
    last = client.send("/echo", b"still here")
    await client.until(lambda: last in client.ended or client.goaway is not None)
    watching.cancel()
    await eventually(lambda: len(app.left) == len(app.begun) - 2)
    assert most_tasks < 100, "requests end as fast as they are reset"


@pytest.mark.parametrize("kind", ["ping", "settings", "empty"])
async def test_frames_that_say_nothing_do_not_keep_others_waiting(start: Start, kind: str) -> None:
    serving = start()
    client = await serving.connect()
    number = client.send("/echo", end=False)
    frames = {
        "ping": b"\0\0\x08\6\0\0\0\0\0" + b"\0" * 8,
        "settings": b"\0\0\0\4\0\0\0\0\0",
        "empty": b"\0\0\0\0\0" + number.to_bytes(4, "big"),  # DATA
    }
    client.writer.write(frames[kind] * 5000)
    await answered(serving)


async def test_many_idle_connections_harm_nobody(start: Start) -> None:
    serving = start()
    peers = [await asyncio.open_connection("127.0.0.1", serving.port) for _ in range(200)]
    await answered(serving)
    assert len(serving.connections._open) >= len(peers)
    for _, writer in peers:
        writer.close()
    await eventually(lambda: len(serving.connections._open) <= 1)


def test_a_prompt_of_50_mb_is_refused_before_it_has_come(live: LiveServer) -> None:
    length = 50 * 2**20
    with socket.create_connection(("127.0.0.1", live.port), timeout=SECONDS) as peer:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        peer.sendall(f'{head}Content-Length: {length}\r\n\r\n{{"prompt": "'.encode())
        assert peer.recv(65536).startswith(b"HTTP/1.1 413 ")
        assert live.get("/health").status_code == 200
