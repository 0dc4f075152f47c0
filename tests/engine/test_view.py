"""Views of sequences on their way through the scheduler, with the toy model."""

from engine.stats import Phase
from engine.view import cells_of, view_of
from tests.engine.driver import Driver


def views(driver: Driver, count: int = 9):
    return [view_of(sequence, driver.now) for sequence in driver.scheduler.first_sequences(count)]


def test_a_sequence_waits_computes_its_prompt_and_decodes():
    driver = Driver.of(num_pages=64, page_size=4, max_num_seqs=1, token_budget=4, run_ahead=0)
    driver.add(list(range(1, 8)), 3)
    driver.add([1, 2, 3], 9)
    assert [view.phase for view in views(driver)] == [Phase.WAITING, Phase.WAITING]
    driver.step()
    first, second = views(driver)
    assert (first.phase, first.prompt_tokens, first.computed_tokens) == (Phase.PREFILL, 7, 4)
    assert (first.output_tokens, first.max_tokens) == (0, 3)
    assert second.phase is Phase.WAITING
    driver.step()
    first = views(driver)[0]
    assert (first.phase, first.computed_tokens, first.output_tokens) == (Phase.DECODE, 7, 1)
    assert first.pages == -(-first.computed_tokens // 4)
    assert sum(cells_of(driver.scheduler.pool, 8).used) == first.pages
    assert len(views(driver, 1)) == 1


def test_a_preempted_sequence_waits_to_compute_its_tokens_again():
    driver = Driver.of(num_pages=8, page_size=4, max_num_seqs=2, overcommit=1.0)
    for first in (1, 20):
        driver.add(list(range(first, first + 8)), 20)
    seen = set()
    while driver.scheduler.num_running or driver.scheduler.num_waiting:
        driver.step()
        seen |= {view.phase for view in views(driver)}
    assert driver.scheduler.num_preemptions, "the pool was large enough for both"
    assert {Phase.PREEMPTED, Phase.DECODE} <= seen
