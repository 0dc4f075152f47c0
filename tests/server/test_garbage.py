"""The collector walks what is new and not what start-up made, and runs in full when no request is open."""

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from server.app import build_app
from server.garbage import MAX_NEW_OBJECTS, MIN_NEW_OBJECTS, IdleCollector, collect_rarely
from server.lifecycle import Server
from server.listener import bind
from server.settings import ServerConfig, Settings
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


def test_cycles_beside_running_requests_are_bounded() -> None:
    knot = weakref.ref(Knot())
    more = [[] for _ in range(MAX_NEW_OBJECTS + 10)]
    assert knot() is None, f"left beside {len(more):,} new objects"


def test_what_start_up_made_is_not_walked() -> None:
    assert gc.get_freeze_count() > MIN_NEW_OBJECTS


async def stream_once(port: int) -> bytes:
    """Stream an answer over a connection of its own."""
    body = json.dumps({"messages": [{"role": "user", "content": "tokens=5"}], "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_streamed_request_leaves_no_cycles_of_ours(engine: FakeEngine) -> None:
    listener = bind("127.0.0.1", 0)
    server = Server(Settings(EngineConfig(), ServerConfig()), listener)
    http = asyncio.create_task(server.serve_http(build_app(engine, ServerConfig())))
    port = listener.getsockname()[1]
    assert b"data: [DONE]" in await stream_once(port)  # the first one fills caches
    await asyncio.sleep(0.05)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await stream_once(port)
        await asyncio.sleep(0.05)
        gc.collect()
        kinds = {type(found).__module__.partition(".")[0] for found in gc.garbage}
        names = sorted({type(found).__qualname__ for found in gc.garbage})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        await server.end_http(http)
    assert not kinds & {"engine", "hypercorn", "server", "starlette"}, names
