"""Requests that arrive together begin a few at a time; one that gives up does not hold up the rest."""

import asyncio

from starlette.types import Receive, Scope, Send

from server.turnstile import REQUESTS_PER_TURN, Turnstile


class Counter:
    """Notes in which turn of the loop each request begins."""

    def __init__(self) -> None:
        self.turn = 0
        self.begun: list[tuple[int, int]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append((self.turn, scope["number"]))

    async def count(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
            self.turn += 1


def request(number: int, method: str = "POST") -> Scope:
    return {"type": "http", "method": method, "number": number}


def enter(turnstile: Turnstile, scope: Scope) -> asyncio.Task[None]:
    return asyncio.create_task(turnstile(scope, None, None))  # type: ignore[arg-type]


async def test_a_burst_begins_a_few_per_turn_and_in_order() -> None:
    counter = Counter()
    turnstile = Turnstile(counter)
    for number in range(50):
        enter(turnstile, request(number))
    await counter.count(50)
    assert [number for _, number in counter.begun] == list(range(50))
    turns = [turn for turn, _ in counter.begun]
    assert max(turns.count(turn) for turn in turns) <= REQUESTS_PER_TURN, turns
    assert turns[-1] <= 50 // REQUESTS_PER_TURN + 2, "no turn is wasted"


async def test_requests_without_a_body_pass() -> None:
    counter = Counter()
    turnstile = Turnstile(counter)
    for number in range(50):
        enter(turnstile, request(number, "GET"))
    await counter.count(2)
    assert len(counter.begun) == 50


async def test_one_that_gives_up_takes_no_place() -> None:
    counter = Counter()
    turnstile = Turnstile(counter)
    tasks = [enter(turnstile, request(number)) for number in range(20)]
    await counter.count(1)
    for task in tasks[8:16]:
        task.cancel()
    await counter.count(20)
    begun = {number for _, number in counter.begun}
    assert begun >= {*range(REQUESTS_PER_TURN), *range(16, 20)}, counter.begun
    assert not begun & set(range(12, 16)), "cancelled while they waited"


async def test_it_rests_when_nobody_comes() -> None:
    counter = Counter()
    turnstile = Turnstile(counter)
    enter(turnstile, request(0))
    await counter.count(5)
    assert not turnstile._is_turning
    enter(turnstile, request(1))
    await counter.count(2)
    assert [number for _, number in counter.begun] == [0, 1]
