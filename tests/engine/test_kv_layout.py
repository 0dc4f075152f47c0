"""The bounds of KVLayout against the pages of a sequence written down step by step."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_layout import KVLayout

PAGE_SIZES = st.sampled_from([1, 2, 3, 16])
WINDOWS = st.lists(st.sampled_from([0, 1, 2, 5, 16, 40]), min_size=1, max_size=4).map(tuple)


def reads(window: int, position: int) -> range:
    """The positions whose keys a query reads."""
    return range(max(0, position - window + 1) if window else 0, position + 1)


@given(WINDOWS, PAGE_SIZES, st.integers(0, 100))
def test_no_later_query_reads_a_column_that_was_left(windows, page_size, position):
    layout = KVLayout(windows, page_size, token_budget=1, run_ahead=0)
    for window, first in zip(windows, layout.first_columns(position), strict=True):
        assert first == min(reads(window, position)) // page_size


@given(WINDOWS, PAGE_SIZES, st.integers(1, 20), st.integers(0, 1), st.data())
def test_what_a_sequence_holds_is_bounded(windows, page_size, budget, run_ahead, data):
    """A prompt in chunks of any size, then an output; pages are returned when a step is committed."""
    num_prompt, num_output = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 60))
    num_found = data.draw(st.integers(0, num_prompt - 1), "tokens found")
    layout = KVLayout(windows, page_size, token_budget=budget, run_ahead=run_ahead)
    left = layout.first_columns(num_found)
    columns = layout.start_columns(num_prompt, left)
    in_prompt = layout.prefill_window_pages(num_prompt, left)
    computed, most = [num_found] * (1 + run_ahead), 0
    while computed[-1] < num_prompt + num_output:
        is_prompt = computed[-1] < num_prompt
        room = data.draw(st.integers(1, budget), "chunk") if is_prompt else 1
        committed = computed[-1 - run_ahead]
        left = [max(pair) for pair in zip(left, layout.first_columns(committed), strict=True)]
        computed.append(min(computed[-1] + room, num_prompt) if is_prompt else computed[-1] + 1)
        columns = [max(before, layout.num_columns(computed[-1])) for before in columns]
        num_held = sum(columns) - sum(left)
        assert num_held <= layout.decode_pages(max(computed[-1], num_prompt), in_prompt)
        if committed >= num_prompt:
            assert num_held <= layout.decode_pages(computed[-1])
        most = max(most, num_held)
    total = computed[-1]
    assert layout.max_tokens(len(windows) * layout.num_columns(total), total) == total
    assert layout.max_tokens(most - 1, total) < total, "it would be let into a pool that is too small"


@given(WINDOWS, PAGE_SIZES, st.integers(0, 60))
def test_pages_are_counted_alike_one_by_one_and_in_arrays(windows, page_size, window_pages):
    layout = KVLayout(windows, page_size, token_budget=8, run_ahead=1)
    tokens = np.arange(200)
    counts = layout.decode_pages(tokens, window_pages)
    assert counts.tolist() == [layout.decode_pages(n, window_pages) for n in range(200)]
    assert (np.diff(counts) >= 0).all()


def test_one_full_group_holds_every_column():
    layout = KVLayout((0,), 16, token_budget=512, run_ahead=1)
    assert [layout.decode_pages(n) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]
    assert layout.first_columns(1000) == [0]
    assert layout.start_columns(1000, [0]) == [63]
    assert layout.max_tokens(num_pages=4, limit=1000) == 64
    assert layout.max_tokens(num_pages=4, limit=50) == 50


def test_a_window_holds_a_constant_number_of_pages():
    layout = KVLayout((4096,), 16, token_budget=512, run_ahead=0)
    assert layout.decode_pages(100_000) == 257
    assert layout.start_columns(100_000, [0]) == [289], "the window and a chunk"
    assert layout.max_tokens(num_pages=289, limit=131_072) == 131_072
    assert layout.max_tokens(num_pages=288, limit=131_072) == 288 * 16
