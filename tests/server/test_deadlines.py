"""Deadlines of many things with one timer, on a clock that the tests set."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from server.deadlines import Deadlines


class Clock:
    """Stands in for a loop: its time is set, and its timers are called then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.num_timers = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Any:
        self.num_timers += 1
        timer = (when, call)
        self.timers.append(timer)
        clock = self

        class Handle:
            def cancel(self) -> None:
                clock.timers.remove(timer)

        return Handle()

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        return self.call_at(self.now + seconds, call)

    def advance(self, now: float) -> None:
        """Set the time, and call the timers in their order."""
        while due := sorted((timer for timer in self.timers if timer[0] <= now), key=lambda timer: timer[0]):
            self.now, call = due[0]
            self.timers.remove(due[0])
            call()
        self.now = now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: found)
    return found


def test_each_item_is_due_at_its_own_time(clock: Clock) -> None:
    due: list[str] = []
    deadlines: Deadlines[str] = Deadlines(10, due.append)
    for now, item in enumerate("abcd"):
        clock.advance(now)
        deadlines.add(item)
    deadlines.discard("b")
    deadlines.discard("unknown")
    assert clock.num_timers == 1, "one timer serves all"
    clock.advance(9.9)
    assert not due
    clock.advance(10)
    assert due == ["a"]
    clock.advance(11)
    assert due == ["a"], "b was discarded"
    clock.advance(13)
    assert due == ["a", "c", "d"]
    assert not clock.timers
    deadlines.add("e")
    clock.advance(23)
    assert due[-1] == "e"


def test_adding_an_item_again_begins_anew(clock: Clock) -> None:
    due: list[str] = []
    deadlines: Deadlines[str] = Deadlines(10, due.append)
    deadlines.add("a")
    deadlines.add("b")
    clock.advance(5)
    deadlines.add("a")
    assert list(deadlines.items()) == [("b", 0), ("a", 5)]
    clock.advance(14)
    assert due == ["b"]
    clock.advance(15)
    assert due == ["b", "a"]


def test_clear_returns_what_was_waited_for(clock: Clock) -> None:
    due: list[str] = []
    deadlines: Deadlines[str] = Deadlines(10, due.append)
    deadlines.add("a")
    assert deadlines.clear() == ["a"]
    assert not clock.timers
    clock.advance(100)
    assert not due
