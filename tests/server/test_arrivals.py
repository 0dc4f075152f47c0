"""Requests that are complete together begin a few at a time; nothing else takes a turn."""

import asyncio
from typing import Any

import httpx
import pytest

from server import body
from server.arrivals import REQUESTS_PER_TURN, ArrivalLimiter
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine


class Counter:
    """Notes in which turn of the loop each request begins."""

    def __init__(self) -> None:
        self.turn = 0
        self.begun: list[tuple[int, int]] = []

    def enter(self, arrivals: ArrivalLimiter, number: int) -> asyncio.Task[None]:
        async def begin() -> None:
            await arrivals.enter()
            self.begun.append((self.turn, number))

        return asyncio.create_task(begin())

    async def count(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
            self.turn += 1


async def test_a_burst_begins_a_few_per_turn_and_in_order() -> None:
    counter, arrivals = Counter(), ArrivalLimiter()
    for number in range(50):
        counter.enter(arrivals, number)
    await counter.count(55)
    assert [number for _, number in counter.begun] == list(range(50))
    turns = [turn for turn, _ in counter.begun]
    assert max(turns.count(turn) for turn in turns) <= REQUESTS_PER_TURN, turns
    assert turns[-1] <= 50 // REQUESTS_PER_TURN + 2, "no turn is wasted"


async def test_one_that_is_cancelled_takes_no_place() -> None:
    counter, arrivals = Counter(), ArrivalLimiter()
    tasks = [counter.enter(arrivals, number) for number in range(20)]
    await counter.count(1)
    for task in tasks[8:16]:
        task.cancel()
    await counter.count(20)
    begun = {number for _, number in counter.begun}
    assert begun >= {*range(REQUESTS_PER_TURN), *range(16, 20)}, counter.begun
    assert not begun & set(range(12, 16)), "cancelled while they waited"


async def test_it_rests_when_nobody_comes() -> None:
    counter, arrivals = Counter(), ArrivalLimiter()
    counter.enter(arrivals, 0)
    await counter.count(5)
    assert not arrivals._is_turning
    counter.enter(arrivals, 1)
    await counter.count(2)
    assert [number for _, number in counter.begun] == [0, 1]


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[ArrivalLimiter]:
    """Every turn that is taken."""
    taken: list[ArrivalLimiter] = []
    enter = ArrivalLimiter.enter

    async def note(arrivals: ArrivalLimiter) -> None:
        taken.append(arrivals)
        await enter(arrivals)

    monkeypatch.setattr(ArrivalLimiter, "enter", note)
    return taken


QUESTION = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("method", "headers", "num_turns"),
    [
        ("POST", {"authorization": "Bearer secret"}, 1),
        ("POST", {"authorization": "Bearer wrong"}, 0),
        ("POST", {"authorization": "Bearer secret", "content-type": "text/plain"}, 0),
        ("GET", {"authorization": "Bearer secret"}, 0),
    ],
)
async def test_only_what_will_be_read_takes_a_turn(
    engine: FakeEngine, entered: list[ArrivalLimiter], method: str, headers: dict[str, str], num_turns: int
) -> None:
    async with client_for(engine, api_key=["secret"]) as client:
        await client.request(method, "/v1/chat/completions", json=QUESTION, headers=headers)
    assert len(entered) == num_turns


async def test_a_turn_is_taken_when_the_body_is_complete(
    client: httpx.AsyncClient, entered: list[ArrivalLimiter]
) -> None:
    half, rest = asyncio.Event(), asyncio.Event()

    async def slowly() -> Any:
        yield b'{"messages": [{"role": "user",'
        half.set()
        await rest.wait()
        yield b' "content": "hi"}]}'

    slow = asyncio.create_task(client.post("/v1/chat/completions", content=slowly()))
    await half.wait()
    assert not entered, "half a body takes no turn"
    assert (await client.post("/v1/chat/completions", json=QUESTION)).status_code == 200
    rest.set()
    assert (await slow).status_code == 200
    assert len(entered) == 2


async def test_a_burst_of_requests_is_read_a_few_per_turn(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, parse = 0, body.parse
    read: list[tuple[int, int]] = []

    def note(data: bytes, *others: Any) -> Any:
        read.append((turn, int(data.split(b'"seed":')[1].split(b"}")[0])))
        return parse(data, *others)

    monkeypatch.setattr(body, "parse", note)
    posts = [
        asyncio.create_task(client.post("/v1/chat/completions", json=QUESTION | {"seed": number}))
        for number in range(40)
    ]
    while not all(post.done() for post in posts):
        await asyncio.sleep(0)
        turn += 1
    assert {(await post).status_code for post in posts} == {200}
    assert [number for _, number in read] == list(range(40))
    turns = [turn for turn, _ in read]
    assert max(map(turns.count, turns)) <= REQUESTS_PER_TURN, turns
