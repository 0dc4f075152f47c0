"""The collector walks what is new and not what start-up made, and runs in full when no request is open."""

import asyncio
import gc
import json
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable, Iterator

import pytest

from engine.config import EngineConfig
from server.app import build_app
from server.config import ServerConfig
from server.garbage import (
    MAX_NEW_OBJECTS,
    MIN_NEW_OBJECTS,
    TRIM_AFTER_CHECKS,
    IdleCollector,
    collect_rarely,
)
from server.lifecycle import Server
from server.listener import bind
from server.settings import Settings
from tests.server.fake_engine import FakeEngine


class Knot:
    """An object in a cycle: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    collect_rarely()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_a_cycle_is_left_while_requests_run_and_freed_when_none_does() -> None:
    is_idle = False
    collector = IdleCollector(lambda: is_idle)
    knot = weakref.ref(Knot())
    more = [[] for _ in range(MIN_NEW_OBJECTS)]
    collector.check()
    assert knot() is not None, "collected beside a request"
    is_idle = True
    collector.check()
    assert knot() is None, "left although no request is open"
    assert len(more) == MIN_NEW_OBJECTS


def test_few_new_objects_are_not_worth_a_collection() -> None:
    knot = weakref.ref(Knot())
    IdleCollector(lambda: True).check()
    assert knot() is not None


def test_freed_memory_is_returned_once_in_an_idle_time() -> None:
    is_idle = True
    collector = IdleCollector(lambda: is_idle)

    def checks(count: int) -> list[int]:
        return [number for number in range(1, count + 1) if collector.check()]

    assert checks(30) == [], "returned although no request has run"
    is_idle = False
    assert checks(30) == [], "returned beside a request"
    is_idle = True
    assert checks(30) == [TRIM_AFTER_CHECKS]
    more = [[] for _ in range(MIN_NEW_OBJECTS)]  # requests between two checks
    assert checks(30) == [TRIM_AFTER_CHECKS], f"not returned after {len(more):,} new objects"


def test_cycles_beside_running_requests_are_bounded() -> None:
    knot = weakref.ref(Knot())
    more = [[] for _ in range(MAX_NEW_OBJECTS + 10)]
    assert knot() is None, f"left beside {len(more):,} new objects"


def test_what_start_up_made_is_not_walked() -> None:
    assert gc.get_freeze_count() > MIN_NEW_OBJECTS


async def begin(port: int, orders: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request for a stream over a connection of its own."""
    body = json.dumps({"messages": [{"role": "user", "content": orders}], "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return reader, writer


async def all_ended(engine: FakeEngine) -> None:
    """Wait until the engine has no request and the server no connection."""
    async with asyncio.timeout(20):
        while engine.live or any(  # noqa: ASYNC110 - nothing tells of the end of a connection
            task.get_name() == "connection" for task in asyncio.all_tasks()
        ):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


async def stream_once(port: int) -> bytes:
    """Stream an answer."""
    reader, writer = await begin(port, "tokens=5")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def vanish(port: int) -> bytes:
    """Begin a stream, and reset the connection in the middle of it."""
    reader, writer = await begin(port, "tokens=1000 delay=0.01")
    answer = await reader.readuntil(b"data: ")
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return answer + b"data: [DONE]"


@pytest.mark.parametrize("act", [stream_once, vanish])
async def test_a_stream_leaves_no_cycles_of_ours(
    engine: FakeEngine, act: Callable[[int], Awaitable[bytes]]
) -> None:
    listener = bind("127.0.0.1", 0)
    server = Server(Settings(EngineConfig(), ServerConfig()), listener)
    http = asyncio.create_task(server.serve_http(build_app(engine, ServerConfig())))
    port = listener.getsockname()[1]
    assert b"data: [DONE]" in await act(port)  # the first one fills caches
    await all_ended(engine)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await act(port)
        await all_ended(engine)
        gc.collect()
        kinds = {type(found).__module__.partition(".")[0] for found in gc.garbage}
        names = sorted({type(found).__qualname__ for found in gc.garbage})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        await server.end_http(http)
    assert not kinds & {"engine", "hypercorn", "server", "starlette"}, names
