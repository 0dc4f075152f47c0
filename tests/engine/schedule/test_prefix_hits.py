"""Prefix hits of the scheduler, driven by the toy model: what is not computed twice."""

import pytest

from tests.engine.driver import SEED, Driver, output_of
from tests.engine.toy import reference


def test_a_second_request_computes_only_tokens_after_the_common_prefix(run_ahead):
    driver = Driver.of(run_ahead=run_ahead)
    common = list(range(30, 43))
    driver.add([*common, 1], max_tokens=4)
    driver.run()
    before = driver.num_prefilled
    second = driver.add([*common, 2, 3], max_tokens=4, ignore_eos=True)
    driver.run()
    assert second.num_cached_tokens == 12, "three full pages of four"
    assert driver.num_prefilled - before == 3
    assert output_of(second) == reference([*common, 2, 3], 4, ignore_eos=True, seed=SEED)
    assert (driver.scheduler.num_queried_tokens, driver.scheduler.num_cached_tokens) == (29, 12)


@pytest.mark.parametrize(("page_size", "cached"), [(1, 15), (4, 12), (16, 0)])
def test_a_full_hit_computes_one_token_or_the_page_it_is_on(page_size, cached):
    driver = Driver.of(page_size=page_size)
    prompt = list(range(16))
    for _ in range(2):
        sequence = driver.add(prompt, max_tokens=3, ignore_eos=True)
        driver.run()
        assert output_of(sequence) == reference(prompt, 3, ignore_eos=True, seed=SEED)
    assert sequence.num_cached_tokens == cached


def test_the_first_chunk_after_a_prefix_hit_is_sized_for_its_context(monkeypatch):
    """A chunk at the end of a prompt takes longer than one at its beginning."""
    driver = Driver.of(max_num_seqs=2, token_budget=64)
    common = list(range(40))
    driver.add([*common, 1], max_tokens=4)
    driver.run()
    num_plans = len(driver.plans)
    monkeypatch.setattr(
        driver.scheduler._budget, "prefill_tokens", lambda num_rows, context: max(30 - context // 2, 5)
    )
    driver.add([*common, *range(50, 80)], max_tokens=2)
    driver.run()
    assert driver.plans[num_plans].query_lens == [10], "30 tokens without context, 10 after 40"


def test_a_conversation_finds_the_pages_of_its_answers(run_ahead):
    driver = Driver.of(run_ahead=run_ahead)
    first = driver.add([1, 2, 3, 4, 5], max_tokens=12, ignore_eos=True)
    driver.run()
    second = driver.add([*first.token_ids, 6, 7], max_tokens=3)
    driver.run()
    assert second.num_cached_tokens == 16, "17 tokens, of which the last was never computed"


def test_computed_pages_are_found_before_their_sequence_ends():
    driver = Driver.of(token_budget=8)
    driver.add(list(range(40)), max_tokens=20, ignore_eos=True)
    for _ in range(8):
        driver.step()
    second = driver.add(list(range(40)), max_tokens=3)
    driver.run()
    assert second.num_cached_tokens == 36


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({}, {"cache_salt": "a"}, {"cache_salt": "b"}),
        ({}, {"cache_salt": "a"}, {}),
        ({}, {"use_prefix_cache": False}, {}),
        ({}, {}, {"use_prefix_cache": False}),
        ({"with_prefix_cache": False}, {}, {}),
    ],
)
def test_no_pages_are_shared_across_salts_or_without_the_prefix_cache(options, first, second):
    driver = Driver.of(**options)
    for own in (first, second):
        sequence = driver.add(list(range(20)), max_tokens=2, **own)
        driver.run()
    assert sequence.num_cached_tokens == 0
    assert driver.num_prefilled == 40


def test_equal_prompts_in_one_step_get_the_right_output(run_ahead):
    driver = Driver.of(run_ahead=run_ahead, token_budget=64)
    sequences = [driver.add(list(range(10)), max_tokens=20, ignore_eos=True) for _ in range(4)]
    driver.run()
    expected = reference(list(range(10)), 20, ignore_eos=True, seed=SEED)
    assert [output_of(sequence) for sequence in sequences] == [expected] * 4
    assert driver.scheduler.pool.num_cached == 7, "kept once"


def test_a_preempted_sequence_finds_its_pages_again():
    driver = Driver.of(num_pages=12, overcommit=1.0)
    sequences = [driver.add([n, n + 1, n + 2], max_tokens=30, ignore_eos=True) for n in range(4)]
    driver.run()
    starts = [
        plan.starts[index]
        for plan in driver.plans
        for index, init in plan.inits.items()
        if init.output_token_ids
    ]
    assert any(start > 0 for start in starts)
    assert all(sequence.num_cached_tokens == 0 for sequence in sequences), "only first starts count"
