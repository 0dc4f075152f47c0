"""The feed about the engine at /live_stats. Covers server/live.py and server/routes/live.py."""

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from engine.stats import PageCells
from server import live
from server.errors import TooManyWatchers
from server.live import Interval, LiveFeed, Recent, pages_of
from server.metrics import Histogram, Metrics
from server.schema.live import LiveStats
from tests.server.conftest import LiveServer, client_for
from tests.server.fake_engine import FakeEngine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events come at once."""
    monkeypatch.setattr(live, "INTERVAL_SECONDS", 0.001)


def feed_of(engine: FakeEngine) -> LiveFeed:
    """A feed about an engine that ends with it."""
    metrics = Metrics()
    return LiveFeed(
        lambda: Interval(engine, metrics.histogram, "m", -1.0),
        lambda: not engine.is_alive or engine.is_draining,
    )


def event_of(data: bytes | None) -> LiveStats:
    """An event of the feed, read with the schema."""
    assert data is not None and data.startswith(b"data: ") and data.endswith(b"\n\n")
    return LiveStats.model_validate_json(data.removeprefix(b"data: "))


def test_recent_values_are_those_since_the_last_look() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(9.0)
    recent = Recent(histogram)
    assert recent.take() is None, "9 came before"
    histogram.observe(1.0, 3)
    histogram.observe(3.0)
    assert recent.take() == (1.5, 3.0)
    assert recent.take_times() is None


async def test_the_pages_of_a_cell_are_fifteenths_that_show_even_one() -> None:
    cells = PageCells(100, used=[0, 1, 100], shared=[0, 50, 0], cached=[100, 49, 0])
    pages = pages_of(FakeEngine().stats(), cells)
    assert (pages.cells, pages.shared, pages.pages_per_cell) == ("00f188f00", 50, 100)


async def test_an_event_says_what_happened_since_the_one_before() -> None:
    engine = FakeEngine()
    metrics = Metrics()
    interval = Interval(engine, metrics.histogram, "m", 10.0)
    engine._num_tokens = 50
    metrics.first_token(0.5)
    metrics.step_finished(0.25, 8, 2)
    event = interval.event(12.0)
    assert (event.interval_seconds, event.output_tokens_per_second, event.totals.output_tokens) == (
        2.0,
        25.0,
        50,
    )
    assert event.ttft is not None and event.ttft.largest_seconds == 0.5
    assert event.itl is None and event.loop_lag is None
    assert event.step is not None and (event.step.mean_seconds, event.tokens_per_step) == (0.25, 8.0)
    assert interval.event(13.0).output_tokens_per_second == 0


async def test_watchers_get_the_same_events_and_a_slow_one_the_newest() -> None:
    engine = FakeEngine()
    feed = feed_of(engine)
    with feed.watch() as first, feed.watch() as second:
        assert (await first.get()) == (await second.get())
        old = await first.get()
        for _ in range(3):
            newest = await first.get()
        assert old != newest == await second.get(), "the events between are not kept"
    assert feed._task is None, "the feed works although there are no watchers"


async def test_the_feed_ends_with_the_engine() -> None:
    engine = FakeEngine()
    feed = feed_of(engine)
    with feed.watch() as watcher:
        event_of(await watcher.get())
        engine.die()
        async with asyncio.timeout(5):
            while await watcher.get() is not None:
                pass


async def test_no_more_watch_than_may() -> None:
    feed = feed_of(FakeEngine())
    watchers = [feed.watch() for _ in range(live.MAX_WATCHERS)]
    for watcher in watchers:
        watcher.__enter__()
    with pytest.raises(TooManyWatchers, match="16 watch"), feed.watch():
        pass
    watchers[0].__exit__(None, None, None)
    with feed.watch():
        pass
    for watcher in watchers[1:]:
        watcher.__exit__(None, None, None)


# Over HTTP


async def test_the_events_are_a_stream_that_ends_when_the_engine_has_drained(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        asyncio.get_running_loop().call_later(0.1, setattr, engine, "is_draining", True)
        response = await client.get("/live_stats")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    events = [event_of(line.encode() + b"\n\n") for line in response.text.splitlines() if line]
    assert len(events) > 1
    assert events[0].pages.free == 1000 and not events[0].draining
    assert events[-1].draining and events[-1].model == "fake-model"
    engine.is_draining = False
    async with client_for(engine) as client:
        head = await client.head("/live_stats")
    assert (head.status_code, head.content) == (200, b"")


async def test_the_stream_asks_for_the_key_and_for_a_model(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("k",)) as client:
        assert (await client.get("/live_stats")).status_code == 401
    async with client_for(None) as client:
        assert (await client.get("/live_stats")).status_code == 503
    async with client_for(engine) as client:
        engine.is_draining = True
        assert (await client.get("/live_stats")).status_code == 503


@pytest.mark.slow
def test_a_live_server_shows_its_sequences_and_drains_beside_watchers(
    start: Callable[..., LiveServer],
) -> None:
    server = start("--body-timeout-seconds", "0.5").ready()
    chat = {"messages": [{"role": "user", "content": "tokens=1000 delay=0.002"}], "stream": True}
    with (
        httpx.stream("GET", f"{server.url}/live_stats", timeout=20) as watched,
        httpx.stream("POST", f"{server.url}/v1/chat/completions", json=chat, timeout=20) as answer,
    ):
        events = (json.loads(line[6:]) for line in watched.iter_lines() if line)
        chunks = answer.iter_lines()
        answer_id = json.loads(next(chunks)[6:])["id"]
        shown = next(event for event in events if event["running"])
        assert [row["id"].startswith(answer_id) for row in shown["sequences"]] == [True]
        assert any(event["output_tokens_per_second"] > 0 for event in events)
        server.process.terminate()
        *draining, last = events  # for longer than a body may take
        assert any(event["draining"] and event["running"] for event in draining)
        assert (last["draining"], last["running"]) == (True, 0)
        assert [line for line in chunks if line][-1] == "data: [DONE]"
    assert server.exit_code() == 0
    assert "Traceback" not in server.log, server.log
