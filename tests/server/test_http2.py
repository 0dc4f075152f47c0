"""HTTP/2 with a rude client: what one stream does harms no other, and answers wait for who does not read.

Covers server/http2_stream.py and server/protocol.py.
"""

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from h2.errors import ErrorCodes
from hypercorn.config import Config

from server.arrivals import REQUESTS_PER_TURN
from server.connections import Connections
from server.watch import STATE as WATCH
from server.watch import ClientGone
from tests.server.h2_client import H2Client

NUM_STREAMS = 1500
FRAME_BYTES = 2**14
WINDOW_BYTES = 65_535


class App:
    """An application that does what the path says."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.num_sent: dict[str, int] = defaultdict(int)
        self.left: list[str] = []
        self.turn = 0
        self.begun: list[int] = []  # turns of the loop

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.begun.append(self.turn)
        watch = scope["state"][WATCH]
        watch.begin(receive, None)
        try:
            with watch:
                await getattr(self, path.strip("/").split("/")[0])(path, receive, send)
        except ClientGone:
            self.left.append(path)

    async def respond(self, send: Any, status: int, body: bytes = b"") -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"Connection", b"close")]})
        await send({"type": "http.response.body", "body": body})

    async def echo(self, path: str, receive: Any, send: Any) -> None:
        body, more_body = b"", True
        while more_body:
            message = await receive()
            body += message["body"]
            more_body = message["more_body"]
        await self.respond(send, 200, body)

    async def early(self, path: str, receive: Any, send: Any) -> None:
        await self.respond(send, 413, b"too long")

    async def wait(self, path: str, receive: Any, send: Any) -> None:
        await self.may_go_on.wait()
        await self.respond(send, 200, b"at last")

    async def fail(self, path: str, receive: Any, send: Any) -> None:
        raise RuntimeError("a bug")

    async def fail_late(self, path: str, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("a bug")

    async def fail_in_head(self, path: str, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b":status", b"200")]})

    async def cancel(self, path: str, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    async def endless(self, path: str, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * FRAME_BYTES, "more_body": True})
            self.num_sent[path] += 1

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


@pytest.fixture
async def app() -> App:
    return App()


class Serving:
    """Connections around an application, on a port of loopback."""

    def __init__(self, app: App, send_timeout_seconds: float = 60) -> None:
        config = Config()
        config.h2_max_concurrent_streams = 4096
        config.graceful_timeout = 20
        config.include_server_header = False
        self.connections = Connections(app, config, send_timeout_seconds)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self.connections.serve(self.listener, self.may_end))
        self.clients: list[H2Client] = []

    async def connect(self, window: int | None = None) -> H2Client:
        self.clients.append(await H2Client.connect(self.port, window))
        return self.clients[-1]

    @property
    def num_idle(self) -> int:
        return len([*self.connections._waiting.items()])

    async def end(self) -> None:
        for client in self.clients:
            await client.close()
        self.may_end.set()
        async with asyncio.timeout(20):
            await self.task


@pytest.fixture
async def start(app: App) -> AsyncIterator[Callable[..., Serving]]:
    """Starts serving the application; checks that all of it ends."""
    started: list[Serving] = []

    def start_one(**options: float) -> Serving:
        started.append(Serving(app, **options))
        return started[-1]

    before = asyncio.all_tasks()
    yield start_one
    for serving in started:
        await serving.end()
    assert asyncio.all_tasks() - before <= {asyncio.current_task()}


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - of many kinds
            await asyncio.sleep(0.001)


Start = Callable[..., Serving]


@pytest.mark.parametrize("stray", ["data", "end", "reset", "window", "trailers"])
async def test_stray_frames_of_an_answered_request_harm_no_other(start: Start, app: App, stray: str) -> None:
    client = await start().connect()
    neighbours = [client.send("/wait") for _ in range(3)]
    number = client.send("/early", b"{", end=False)
    assert await client.answer(number) == (413, b"too long")
    await client.until(lambda: number in client.resets)
    assert client.resets[number] == ErrorCodes.NO_ERROR, "what is left of the body is not needed"
    client.frames.streams.pop(number, None)
    frame = {
        "data": b"\0\0\3\0\0%babc",
        "end": b"\0\0\3\0\1%babc",
        "reset": b"\0\0\4\3\0%b\0\0\0\x08",
        "window": b"\0\0\4\x08\0%b\0\0\0\x08",
        "trailers": b"\0\0\1\1\5%b\x84",
    }[stray] % number.to_bytes(4, "big")
    for _ in range(10):
        client.writer.write(frame)
    last = client.send("/echo", b"still there")
    assert await client.answer(last) == (200, b"still there")
    app.may_go_on.set()
    for neighbour in neighbours:
        assert await client.answer(neighbour) == (200, b"at last")


FAULTS: dict[str, tuple[dict[str, Any], int]] = {
    "an exception": ({"path": "/fail"}, 500),
    "an exception after the head": ({"path": "/fail_late"}, 0),
    "a head that is none": ({"path": "/fail_in_head"}, 0),
    "a cancellation": ({"path": "/cancel"}, 500),
    "a path that is not ASCII": ({"path": "/é"}, 0),
    "no path": ({"path": ""}, 0),
    "a method without a path": ({"method": "CONNECT"}, 0),
    "a header of HTTP/1.1": ({"path": "/echo", "connection": "close"}, 0),
    "a name in capitals": ({"path": "/echo", "Name": "x"}, 0),
    "a length that is none": ({"path": "/echo", "content_length": "1x"}, 0),
    "more than the length": ({"path": "/echo", "body": b"12345", "content_length": "4"}, 0),
    "less than the length": ({"path": "/echo", "body": b"123", "content_length": "4"}, 0),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_fault_of_a_request_harms_no_other(
    start: Start, app: App, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = await start().connect()
    client.frames.config.normalize_outbound_headers = False
    neighbours = [client.send("/wait") for _ in range(3)]
    request, status = FAULTS[fault]
    number = client.send(**request)
    await client.until(lambda: number in client.resets or number in client.ended)
    if status:
        assert client.statuses[number] == status
    else:
        assert client.resets[number] in (ErrorCodes.PROTOCOL_ERROR, ErrorCodes.INTERNAL_ERROR)
    app.may_go_on.set()
    for neighbour in neighbours:
        assert await client.answer(neighbour) == (200, b"at last")
    assert "a connection failed" not in caplog.text


async def test_malformed_bodies_do_not_use_up_the_window_of_others(start: Start) -> None:
    client = await start().connect()
    for _ in range(6):
        number = client.send("/echo", b"x" * FRAME_BYTES, content_length="1")
        await client.until(lambda number=number: number in client.resets)
    assert await client.answer(client.send("/echo", b"x" * FRAME_BYTES)) == (200, b"x" * FRAME_BYTES)


async def test_a_thousand_streams_and_more_share_a_connection(start: Start, app: App) -> None:
    client = await start().connect()
    await client.until(lambda: client.frames.remote_settings.max_concurrent_streams == 4096)
    numbers = [client.begin("/wait", method="GET") for _ in range(NUM_STREAMS)]
    client.flush()
    await eventually(lambda: len(app.begun) == NUM_STREAMS)
    app.may_go_on.set()
    await client.until(lambda: len(client.ended) == NUM_STREAMS)
    assert {client.bodies[number] for number in numbers} == {b"at last"}


async def test_answer_waits_for_the_window_of_its_stream(start: Start, app: App) -> None:
    serving = start()
    client = await serving.connect(window=FRAME_BYTES)
    client.is_stingy = True
    numbers = [client.send(f"/endless/{index}") for index in range(3)]
    await client.until(lambda: all(len(client.bodies[number]) == FRAME_BYTES for number in numbers))
    client.frames.increment_flow_control_window(2 * FRAME_BYTES, numbers[1])
    client.flush()
    await client.until(lambda: len(client.bodies[numbers[1]]) == WINDOW_BYTES - 2 * FRAME_BYTES)
    assert {*app.num_sent.values()} == {1}, "the rest is not computed"
    client.frames.reset_stream(numbers[0])
    client.flush()
    await eventually(lambda: app.left == ["/endless/0"])
    await client.close()
    await eventually(lambda: len(app.left) == 3)


async def test_streams_share_the_window_of_their_connection(start: Start) -> None:
    client = await start().connect(window=2**24)
    client.is_stingy = True
    numbers = [client.send(f"/endless/{index}") for index in range(4)]
    await client.until(lambda: sum(map(len, client.bodies.values())) == WINDOW_BYTES)
    before = {number: len(client.bodies[number]) for number in numbers}
    for num_frames in range(1, 21):
        client.frames.increment_flow_control_window(FRAME_BYTES)
        client.flush()
        await client.until(
            lambda num_frames=num_frames: (
                sum(map(len, client.bodies.values())) == WINDOW_BYTES + num_frames * FRAME_BYTES
            )
        )
    received = [len(client.bodies[number]) - before[number] for number in numbers]
    assert {*received} == {5 * FRAME_BYTES}, received


@pytest.mark.parametrize("path", ["/endless", "/echo"])
async def test_stream_of_a_client_that_does_not_read_is_reset(start: Start, app: App, path: str) -> None:
    client = await start(send_timeout_seconds=0.05).connect(window=0)
    number = client.send(path, b"an answer that is not taken")
    await client.until(lambda: number in client.resets)
    assert client.resets[number] == ErrorCodes.CANCEL
    assert number not in client.ended
    await eventually(lambda: app.left == [path])


async def test_connection_without_requests_is_idle(start: Start, app: App) -> None:
    serving = start()
    client = await serving.connect()
    await eventually(lambda: serving.num_idle == 1)
    first, second = client.send("/wait"), client.send("/endless")
    await eventually(lambda: serving.num_idle == 0)
    client.frames.reset_stream(second)
    client.flush()
    await eventually(lambda: app.left == ["/endless"])
    assert serving.num_idle == 0, "one is left"
    app.may_go_on.set()
    await client.answer(first)
    assert serving.num_idle == 1
    client.frames.ping(b"12345678")
    number = client.send("/endless")
    await client.until(lambda: client.bodies[number])
    assert serving.num_idle == 0
    client.frames.reset_stream(number)
    client.flush()
    await eventually(lambda: serving.num_idle == 1)


async def test_client_that_leaves_ends_its_requests(start: Start, app: App) -> None:
    serving = start()
    client = await serving.connect()
    client.send("/wait")
    client.send("/endless")
    await eventually(lambda: len(app.begun) == 2)
    await client.close()
    await eventually(lambda: sorted(app.left) == ["/endless", "/wait"])
    await eventually(lambda: not serving.connections._tasks)


async def test_body_is_taken_as_far_as_the_application_reads(start: Start, app: App) -> None:
    client = await start().connect()
    unread = client.send("/wait", b"x" * FRAME_BYTES, end=False)
    for _ in range(2):
        client.frames.send_data(unread, b"x" * FRAME_BYTES)
    client.flush()
    body = bytes(range(256)) * 1000
    number = client.send("/echo", b"", end=False)
    rest = memoryview(body)
    while rest:
        await client.until(lambda: client.frames.local_flow_control_window(number) > 0)
        num_bytes = min(len(rest), FRAME_BYTES, client.frames.local_flow_control_window(number))
        client.frames.send_data(number, bytes(rest[:num_bytes]), pad_length=None)
        client.flush()
        rest = rest[num_bytes:]
    client.frames.end_stream(number)
    client.flush()
    assert await client.answer(number) == (200, body)
    assert client.frames.local_flow_control_window(unread) == WINDOW_BYTES - 3 * FRAME_BYTES


@pytest.mark.parametrize(("method", "most"), [("POST", REQUESTS_PER_TURN), ("GET", 1)])
async def test_burst_of_requests_begins_a_few_per_turn(
    start: Start, app: App, method: str, most: int
) -> None:
    client = await start().connect()
    turns = asyncio.create_task(app.count_turns())
    numbers = [client.begin("/early", method=method) for _ in range(100)]
    client.flush()
    await client.until(lambda: len(client.ended) == len(numbers))
    turns.cancel()
    assert max(map(app.begun.count, app.begun)) <= most, app.begun


async def test_burst_of_small_frames_takes_many_turns(start: Start, app: App) -> None:
    client = await start().connect()
    await client.until(lambda: client.frames.remote_settings.max_concurrent_streams == 4096)
    turns = asyncio.create_task(app.count_turns())
    await asyncio.sleep(0)
    before = app.turn
    for _ in range(1000):
        client.frames.increment_flow_control_window(1)
    number = client.send("/early", method="GET")
    await client.answer(number)
    turns.cancel()
    assert app.turn - before >= 1000 / 32


async def test_head_has_no_body_and_no_header_of_http1(start: Start) -> None:
    client = await start().connect()
    number = client.send("/early", method="HEAD")
    assert await client.answer(number) == (413, b"")
    assert {"date", ":status"} == {*client.headers[number]}


@pytest.mark.parametrize("data", [b"x" * 100, b"\xff" * 100, b"\0\0\1\1\5\0\0\0\x09\xff"])
async def test_garbage_ends_its_connection(
    start: Start, app: App, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client = await start().connect()
    client.send("/wait")
    await eventually(lambda: app.begun)
    client.writer.write(data)
    await client.until_closed()
    assert client.goaway not in (None, ErrorCodes.NO_ERROR)
    await eventually(lambda: app.left == ["/wait"])
    assert not caplog.records


async def test_end_of_the_server_waits_for_streams_and_refuses_new_ones(start: Start, app: App) -> None:
    serving = start()
    client, idle = await serving.connect(), await serving.connect()
    number = client.send("/wait")
    await eventually(lambda: app.begun and serving.num_idle == 1)
    serving.may_end.set()
    await idle.until_closed()
    assert idle.goaway == ErrorCodes.NO_ERROR, "requests that cross may be sent elsewhere"
    refused = client.send("/early")
    await client.until(lambda: refused in client.resets)
    assert client.resets[refused] == ErrorCodes.REFUSED_STREAM
    app.may_go_on.set()
    assert await client.answer(number) == (200, b"at last")
    await client.until_closed()
    assert client.goaway == ErrorCodes.NO_ERROR


@pytest.mark.parametrize("settings", ["AAMAAABk", "AAAA"])
async def test_upgrade_of_http1(start: Start, settings: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", start().port)
    writer.write(
        b"GET /early HTTP/1.1\r\nHost: test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: %s\r\n\r\n" % settings.encode()
    )
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    client = H2Client(reader, writer)
    if settings == "AAAA":
        await client.until_closed()
    else:
        client.frames.initiate_upgrade_connection()
        client.flush()
        assert await client.answer(1) == (413, b"too long")
    await client.close()
