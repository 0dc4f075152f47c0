"""The collector walks what is new and not what start-up made, and runs in full when no request is open."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from server.garbage import MAX_NEW_OBJECTS, MIN_NEW_OBJECTS, IdleCollector, collect_rarely


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
