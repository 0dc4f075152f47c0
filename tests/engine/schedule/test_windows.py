"""Sliding windows on the loop: which pages are held, returned, found again and shared. The toy model reads
through the page tables, so a page returned too early changes its text.

Covers engine/schedule/allocator.py.
"""

import pytest

from engine.errors import ContextLengthExceeded
from engine.outputs import NO_PAGE
from tests.engine.driver import Driver, output_of
from tests.engine.toy import reference

WINDOW = (6,)
MIXED = (6, 0)


def check(driver: Driver, sequence, windows: tuple[int, ...]) -> None:
    prompt, max_tokens = list(sequence.request.prompt_token_ids), sequence.request.sampling.max_tokens
    expected = reference(prompt, max_tokens, ignore_eos=True, seed=sequence.seed, windows=windows)
    assert output_of(sequence) == expected


def most_used(driver: Driver) -> list[int]:
    """Run to the end; return the number of pages held after each step."""
    used = []
    while driver.step():
        used.append(driver.scheduler.pool.num_used)
    driver.scheduler.check_idle()
    return used


def test_pages_stop_growing_once_an_output_exceeds_the_window(run_ahead):
    driver = Driver.of(kv_windows=WINDOW, page_size=2, num_pages=64, run_ahead=run_ahead)
    sequence = driver.add([1, 2, 3], max_tokens=100, ignore_eos=True)
    used = most_used(driver)
    check(driver, sequence, WINDOW)
    assert max(used) <= 4 + run_ahead, "a window of 6 spans up to 4 pages"
    assert driver.scheduler.num_preemptions == 0


def test_full_groups_keep_all_their_pages(run_ahead):
    driver = Driver.of(kv_windows=MIXED, page_size=2, num_pages=64, run_ahead=run_ahead)
    sequence = driver.add([1, 2, 3], max_tokens=40, ignore_eos=True)
    used = most_used(driver)
    check(driver, sequence, MIXED)
    assert 21 < max(used) <= 21 + 4 + run_ahead, "42 tokens, and the window"


def test_a_prompt_longer_than_the_pool_is_computed_in_its_window(run_ahead):
    driver = Driver.of(
        kv_windows=WINDOW,
        page_size=2,
        num_pages=16,
        token_budget=8,
        max_model_len=200,
        run_ahead=run_ahead,
    )
    sequence = driver.add(list(range(90)), max_tokens=20, ignore_eos=True)
    used = most_used(driver)
    check(driver, sequence, WINDOW)
    assert max(used) <= (6 - 1 + 8 * (1 + run_ahead) + 2) // 2


def test_the_context_limit_counts_windows():
    options = {"page_size": 2, "num_pages": 16, "token_budget": 8, "max_model_len": 200, "run_ahead": 0}
    Driver.of(kv_windows=WINDOW, **options).add([1] * 100, max_tokens=100)
    mixed = Driver.of(kv_windows=MIXED, **options)
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 18 tokens"):
        mixed.add([1] * 10, max_tokens=9)
    mixed.add([1] * 10, max_tokens=8)
    mixed.run()


def test_prompts_that_block_each_other_are_preempted(run_ahead):
    """No page is free between their chunks: the later prompt is preempted, and the first continues."""
    options = {"page_size": 1, "num_pages": 64, "token_budget": 8, "max_model_len": 120}
    driver = Driver.of(kv_windows=WINDOW, run_ahead=run_ahead, **options)
    sequences = [driver.add([n, *range(60)], max_tokens=5, ignore_eos=True) for n in range(2)]
    pool = driver.scheduler.pool
    for _ in range(4):
        driver.step()
    while sequences[1].num_scheduled_tokens < 10:
        driver.step()
    taken = pool.allocate(pool.num_free)
    while not driver.scheduler.num_preemptions:
        driver.scheduler.prefix_cache.evict(pool.num_cached)
        taken += pool.allocate(pool.num_free)
        assert driver.step(), "no step is planned"
    assert sequences[1].num_preemptions == 1
    pool.free(taken)
    driver.run()
    for sequence in sequences:
        check(driver, sequence, WINDOW)


@pytest.mark.parametrize("windows", [WINDOW, MIXED, (3, 6, 0)])
def test_a_hit_is_found_after_pages_that_left_the_window(run_ahead, windows):
    driver = Driver.of(kv_windows=windows, page_size=2, num_pages=200, run_ahead=run_ahead)
    prompt = list(range(40))
    first = driver.add(prompt, max_tokens=12, ignore_eos=True)
    driver.run()
    conversation = [*first.token_ids, 6, 7]
    second = driver.add(conversation, max_tokens=8, ignore_eos=True)
    driver.run()
    check(driver, second, windows)
    assert second.num_cached_tokens == 50, "51 tokens were computed"
    third = driver.add([*prompt[:30], 5], max_tokens=8, ignore_eos=True)
    driver.run()
    check(driver, third, windows)
    assert third.num_cached_tokens == 30, "pages in the middle were cached as the window left them"


def test_a_hit_ends_before_evicted_pages():
    driver = Driver.of(kv_windows=MIXED, page_size=2, num_pages=64, run_ahead=0)
    prompt = list(range(40))
    running = driver.add(prompt, max_tokens=20, ignore_eos=True)
    while not running.num_output_tokens:
        driver.step()
    scheduler = driver.scheduler
    cached = scheduler.pool.num_cached
    assert cached, "pages that the prompt's window left"
    scheduler.prefix_cache.evict(cached)
    assert scheduler.pool.num_cached == 0
    shorter = driver.add([*prompt[:30], 5], max_tokens=4, ignore_eos=True)
    longer = driver.add([*prompt, 5], max_tokens=4, ignore_eos=True)
    driver.run()
    assert (shorter.num_cached_tokens, longer.num_cached_tokens) == (0, 40)
    for sequence in (running, shorter, longer):
        check(driver, sequence, MIXED)


@pytest.mark.parametrize("windows", [WINDOW, MIXED])
@pytest.mark.parametrize("length", [1, 5, 6, 7, 40])
def test_samples_share_a_prompt_and_copy_its_last_page_of_every_group(run_ahead, windows, length):
    driver = Driver.of(kv_windows=windows, run_ahead=run_ahead, token_budget=16)
    prompt = list(range(length))
    samples = driver.add_group(prompt, 3, max_tokens=15, ignore_eos=True)
    driver.run()
    for sample in samples:
        check(driver, sample, windows)
    copies = [copy for plan in driver.plans for copy in plan.page_copies]
    assert len(copies) == (2 * len(windows) if (length - 1) % 4 else 0)
    assert driver.num_prefilled == length + 2, "the followers compute one token each"


def test_late_samples_recompute_pages_the_leader_has_freed():
    driver = Driver.of(kv_windows=WINDOW, max_num_seqs=1, with_prefix_cache=False)
    samples = driver.add_group(list(range(12)), 2, max_tokens=30, ignore_eos=True)
    driver.run()
    for sample in samples:
        check(driver, sample, WINDOW)


def test_preempted_sequences_resume_with_their_windows(run_ahead):
    driver = Driver.of(kv_windows=MIXED, num_pages=24, run_ahead=run_ahead, overcommit=1.0)
    sequences = [driver.add([n, n + 1, n + 2], max_tokens=30, ignore_eos=True) for n in range(4)]
    driver.run()
    assert driver.scheduler.num_preemptions >= 2
    for sequence in sequences:
        check(driver, sequence, MIXED)


def test_rows_have_no_pages_before_the_window():
    driver = Driver.of(kv_windows=MIXED, page_size=2, num_pages=64, run_ahead=0)
    prompt = list(range(20))
    for _ in range(2):
        driver.add(prompt, max_tokens=1)
        driver.run()
    in_window, in_full = driver.plans[-1].new_pages[0]
    assert len(in_window) == len(in_full) == 10
    assert [page == NO_PAGE for page in in_window] == [True] * 6 + [False] * 4
    assert NO_PAGE not in in_full
