"""Totals of the engine, counted over the steps of a scheduler with the toy model."""

from engine.counters import Counters
from tests.engine.driver import Driver


def run_step(driver: Driver, counters: Counters, num_constrained: int = 0) -> None:
    """Compute a step, count it, and commit it."""
    assert driver.launch()
    plan, output = driver.in_flight[0]
    assert output is not None
    counters.step(plan, output._replace(num_constrained=num_constrained))
    driver.commit()


def snapshot(driver: Driver, counters: Counters):
    return counters.snapshot(driver.scheduler, driver.now, alive=True, draining=False)


def test_steps_are_counted_by_their_kind():
    driver, counters = Driver.of(), Counters(0.0)
    driver.add([1, 2, 3], 9)
    run_step(driver, counters)  # a prompt alone
    run_step(driver, counters)  # a decode row alone
    assert snapshot(driver, counters).mixed_steps_total == 0
    driver.add([4, 5, 6], 9)
    run_step(driver, counters, num_constrained=2)  # both
    stats = snapshot(driver, counters)
    assert (stats.steps_total, stats.mixed_steps_total, stats.constrained_steps_total) == (3, 1, 1)


def test_the_device_is_idle_between_steps_while_work_waits():
    driver, counters = Driver.of(), Counters(0.0)
    driver.add([1, 2, 3], 9)
    counters.idle_meter.work_arrived(driver.now)
    run_step(driver, counters)
    driver.now += 0.5
    run_step(driver, counters)
    stats = snapshot(driver, counters)
    assert (stats.device_idle_seconds_total, stats.device_idle_share) == (0.5, 0.2)


def test_a_snapshot_shows_the_state_of_the_scheduler():
    driver, counters = Driver.of(num_pages=64, page_size=4, max_num_seqs=1), Counters(0.0)
    driver.add([1, 2, 3, 4, 5], 9)
    driver.add([1, 2, 3, 4, 5], 9)
    run_step(driver, counters)
    stats = snapshot(driver, counters)
    assert (stats.running, stats.waiting, stats.pages_used, stats.page_size) == (1, 1, 2, 4)
    assert stats.pages_used + stats.pages_cached + stats.pages_free == 64
    assert stats.pages_predicted >= stats.pages_used
    driver.run()
    stats = snapshot(driver, counters)
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert (stats.queried_prompt_tokens_total, stats.cached_prompt_tokens_total) == (10, 4)
