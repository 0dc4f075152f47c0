import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.lengths import MIN_AHEAD, PRIOR, WINDOW, OutputLengths


def seen(*lengths: int, cut: int = 0) -> OutputLengths:
    """Return OutputLengths with a window full of these lengths, of which the last `cut` were cut off."""
    known = OutputLengths()
    for _ in range(-(-WINDOW // len(lengths))):
        for index, length in enumerate(lengths):
            known.observe(length, is_complete=index < len(lengths) - cut)
    return known


def test_a_prediction_is_a_quantile():
    known = seen(100, 200, 300, 400)
    assert [known.guess(0, q) for q in (0.0, 0.25, 0.5, 0.75, 1.0)] == [100, 100, 200, 300, 400]


def test_a_prediction_depends_on_the_tokens_so_far():
    known = seen(100, 200, 300, 400)
    assert known.guess(99, 0.0) == 99 + MIN_AHEAD
    assert known.guess(100, 0.0) == 200
    assert known.guess(150, 0.5) == 300, "the output is longer than 100: 200, 300 and 400 are left"
    assert known.guess(390, 0.5) == 390 + MIN_AHEAD
    assert known.guess(500, 0.5) == 1000, "longer than any"


def test_outputs_that_were_cut_do_not_shorten_predictions():
    known = seen(*[16] * 8, 500, 1000, cut=0)
    assert known.guess(0, 0.5) == 16
    known = seen(500, 1000, *[16] * 8, cut=8)
    assert known.guess(0, 0.5) == 500
    assert known.guess(0, 1.0) == 1000
    assert seen(64, cut=1).guess(0, 0.5) == 128, "no end was seen"


def test_without_observations_a_prior_is_used():
    known = OutputLengths()
    assert known.guess(0, 0.5) == PRIOR[len(PRIOR) // 2 - 1]
    assert known.guess(0, 1.0) == PRIOR[-1]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=60),
    st.integers(0, 60),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_predictions_rise_with_quantile_and_progress(observations, produced, low, high):
    known = OutputLengths()
    for length, is_complete in observations:
        known.observe(length, is_complete=is_complete)
    low, high = sorted((low, high))
    assert produced + MIN_AHEAD <= known.guess(produced, low) <= known.guess(produced, high)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=100), st.integers(0, 150), st.floats(0.01, 0.99))
def test_without_cuts_a_prediction_is_the_empirical_quantile(lengths, produced, quantile):
    known = OutputLengths()
    for length in lengths:
        known.observe(length, is_complete=True)
    longer = sorted(length for length in [*PRIOR, *lengths] if length > produced)
    expected = next(
        length
        for index, length in enumerate(longer, 1)
        if index / len(longer) >= quantile - 1e-9 and length != (longer[index] if index < len(longer) else 0)
    )
    assert known.guess(produced, quantile) == pytest.approx(max(expected, produced + MIN_AHEAD))
