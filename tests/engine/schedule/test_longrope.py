"""Sequences that outgrow the short context of LongRoPE get other keys."""

import pytest

from tests.engine.driver import Driver

PROMPT = list(range(1, 21))


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens", "is_long"), [
    (8, 1, False),
    (8, 3, False),
    (8, 4, True),
    (10, 1, False),
    (10, 2, True),
    (11, 1, True),
])  # fmt: skip
def test_a_sequence_is_long_once_a_token_after_the_border_is_computed(
    run_ahead, num_prompt_tokens, max_tokens, is_long
):
    """The last token of an output is sampled and never computed."""
    driver = Driver.of(short_context=10, run_ahead=run_ahead)
    sequence = driver.add(PROMPT[:num_prompt_tokens], max_tokens=max_tokens, ignore_eos=True)
    driver.run()
    assert sequence.num_output_tokens == max_tokens
    assert sequence.is_long == is_long
    assert driver.scheduler.num_preemptions == 0, "it made no room for another"


def test_short_and_long_sequences_share_no_pages():
    driver = Driver.of(page_size=4, short_context=10)
    for num_tokens, num_cached in ((10, 0), (20, 0), (10, 8), (20, 16)):
        sequence = driver.add(PROMPT[:num_tokens], max_tokens=1)
        driver.run()
        assert sequence.num_cached_tokens == num_cached
