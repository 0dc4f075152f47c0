"""The predicted peak against a simulation, page by page and step by step."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv_layout import KVLayout
from engine.schedule.forecast import Forecast, LengthForecast
from engine.schedule.pages import PagePool

NUM_SLOTS = 8


@dataclass
class Sequence:
    """Tokens and pages of one slot, and when it is expected to be ready and to end.

    `pages` are those of full groups, column by column.
    """

    slot: int
    num_tokens: int
    ready: int
    end: int
    pages: list[int] = field(default_factory=list)

    @property
    def length(self) -> LengthForecast:
        return LengthForecast(self.num_tokens, self.ready, self.end)

    def tokens_at(self, step: int) -> int:
        return self.num_tokens + max(0, step - self.ready)


def layout_of(windows: tuple[int, ...], page_size: int) -> KVLayout:
    return KVLayout(windows, page_size, token_budget=16, run_ahead=0)


def simulated_peak(sequences: list[Sequence], layout: KVLayout, step: int) -> int:
    """Count the pages held at each step and return the most. Pages of windows are not shared."""
    peak = 0
    for now in range(step, max((sequence.end for sequence in sequences), default=step) + 1):
        held: set[object] = set()
        for sequence in sequences:
            if sequence.end >= now:
                tokens = sequence.tokens_at(now)
                num_columns = layout.num_columns(tokens)
                for index in range(num_columns * len(layout.full_groups)):
                    is_there = index < len(sequence.pages)
                    held.add(sequence.pages[index] if is_there else (sequence.slot, index))
                first_columns = layout.first_columns(tokens - 1)
                for group in layout.window_groups:
                    columns = range(first_columns[group], num_columns)
                    held.update(("window", sequence.slot, group, column) for column in columns)
        peak = max(peak, len(held))
    return peak


WINDOWS = st.sampled_from([(0,), (0, 0), (0, 5), (7,), (3, 0, 20)])


def check_peak(
    found: int, expected: int, layout: KVLayout, num_sequences: int, is_exact: bool = True
) -> None:
    """Check a peak: exact for full groups; a window counts up to one page more for each sequence."""
    assert found >= expected
    assert found <= expected + len(layout.window_groups) * num_sequences or not is_exact


@given(
    WINDOWS,
    st.sampled_from([1, 2, 3, 16, 64]),
    st.lists(st.tuples(st.integers(1, 200), st.integers(-5, 9), st.integers(0, 150)), max_size=12),
    st.integers(1, 500),
)
def test_the_peak_matches_a_simulation_of_every_step(windows, page_size, descriptions, step):
    pool, layout = PagePool(10_000, page_size), layout_of(windows, page_size)
    forecast = Forecast(pool, layout, 12)
    sequences = []
    for slot, (num_tokens, delay, length) in enumerate(descriptions):
        ready = step + delay
        end = max(step, ready) + length
        sequences.append(Sequence(slot, num_tokens, ready, end))
        if slot < len(descriptions) - 1:
            forecast.start(slot, sequences[-1].length)
    expected = simulated_peak(sequences, layout, step)
    if sequences:
        last = sequences[-1]
        check_peak(forecast.peak(step, last.length), expected, layout, len(sequences))
        forecast.start(last.slot, last.length)
    check_peak(forecast.peak(step), expected, layout, len(sequences))
    assert forecast.bound() >= expected


def test_a_prompt_longer_than_its_window_is_counted_until_it_is_computed():
    layout = layout_of((4,), 1)
    forecast = Forecast(PagePool(100, 1), layout, 2)
    in_prompt = layout.prefill_window_pages(50, [0])
    assert in_prompt == 4 - 1 + 16, "the window before its first query, and a chunk"
    forecast.start(0, LengthForecast(50, 3, 20, in_prompt))
    assert forecast.peak(0) == forecast.bound() == in_prompt
    forecast.move(0, LengthForecast(51, 4, 30), [])
    assert forecast.peak(4) == in_prompt, "its last chunk is not committed yet"
    forecast.end_prompt(0)
    assert forecast.peak(4) == forecast.bound() == 4


class ForecastMachine(RuleBasedStateMachine):
    """Sequences share pages, grow, and end when expected or earlier."""

    @initialize(page_size=st.sampled_from([1, 2, 3]), windows=WINDOWS, ends_early=st.booleans())
    def begin(self, page_size, windows, ends_early):
        self.pool = PagePool(4000, page_size)
        self.layout = layout_of(windows, page_size)
        self.num_full = len(self.layout.full_groups)
        self.forecast = Forecast(self.pool, self.layout, NUM_SLOTS)
        self.running: dict[int, Sequence] = {}
        self.step = 0
        self.ends_early = ends_early
        self.any_ended_early = False

    @precondition(lambda self: len(self.running) < NUM_SLOTS)
    @rule(
        num_tokens=st.integers(1, 12),
        delay=st.integers(0, 3),
        length=st.integers(0, 12),
        index=st.integers(0, 100),
        num_shared=st.integers(0, 12),
    )
    def start(self, num_tokens, delay, length, index, num_shared):
        slot = min(set(range(NUM_SLOTS)) - self.running.keys())
        ready = self.step + delay
        new = Sequence(slot, num_tokens, ready, ready + length)
        shared: list[int] = []
        if self.running and num_shared:
            other = list(self.running.values())[index % len(self.running)]
            known = min(other.num_tokens, num_tokens) // self.pool.page_size
            shared = other.pages[: min(num_shared, known) * self.num_full]
            self.forecast.own(other.slot, shared)
        shared_index = np.array(shared, np.int32)
        sequences = list(self.running.values())
        new.pages = list(shared)
        expected = simulated_peak([*sequences, new], self.layout, self.step)
        self.check(self.forecast.peak(self.step, new.length, shared_index), expected, len(sequences) + 1)
        bound = self.forecast.bound(new.length, shared_index)
        self.pool.share(shared_index)
        new.pages += self.pool.allocate(self.num_pages_of(new) - len(shared))
        self.forecast.start(slot, new.length, shared_index)
        self.running[slot] = new
        self.check(self.forecast.peak(self.step), expected, len(self.running))
        assert bound == self.forecast.bound() >= expected

    def num_pages_of(self, sequence: Sequence) -> int:
        """Return the number of its pages in full groups at this step."""
        return self.layout.num_columns(sequence.tokens_at(self.step)) * self.num_full

    def check(self, found: int, expected: int, num_sequences: int) -> None:
        """Check a peak: exact, or too high where the last holder of a shared page ended too early."""
        check_peak(found, expected, self.layout, num_sequences, not self.any_ended_early)

    @rule()
    def advance(self):
        for sequence in [s for s in self.running.values() if s.end <= self.step]:
            self._finish(sequence)
        self.step += 1
        for sequence in self.running.values():
            sequence.pages += self.pool.allocate(self.num_pages_of(sequence) - len(sequence.pages))

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 100))
    def end_early(self, index):
        if self.ends_early:
            self.any_ended_early = True
            self._finish(list(self.running.values())[index % len(self.running)])

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 100), more=st.integers(0, 8), later=st.integers(0, 3))
    def move(self, index, more, later):
        sequence = list(self.running.values())[index % len(self.running)]
        if sequence.ready > self.step:
            sequence.ready += later
            sequence.end += later
        sequence.end += more
        self.forecast.move(sequence.slot, sequence.length, sequence.pages)

    def _finish(self, sequence: Sequence) -> None:
        del self.running[sequence.slot]
        released = self.pool.free(sequence.pages)
        self.forecast.finish(sequence.slot, sequence.pages, released)

    @invariant()
    def the_peak_is_right(self):
        if hasattr(self, "pool"):
            sequences = list(self.running.values())
            expected = simulated_peak(sequences, self.layout, self.step)
            self.check(self.forecast.peak(self.step), expected, len(sequences))
            assert self.forecast.bound() >= expected
            assert self.forecast.overdue(self.step) == []

    def teardown(self):
        if hasattr(self, "pool"):
            for sequence in list(self.running.values()):
                self._finish(sequence)
            assert self.forecast.peak(self.step) == 0
            assert (self.forecast._owner == -1).all()


TestForecastMachine = ForecastMachine.TestCase
TestForecastMachine.settings = settings(max_examples=150, stateful_step_count=40)
