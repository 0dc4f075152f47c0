"""The order in which the scheduler starts and preempts sequences, and its limits of size and time."""

import pytest

from engine.errors import QueueFull
from engine.outputs import FinishReason
from tests.engine.driver import SEED, Driver, output_of
from tests.engine.toy import reference


def test_without_overcommit_nothing_is_preempted(run_ahead):
    driver = Driver.of(num_pages=20, run_ahead=run_ahead, overcommit=0.0)
    sequences = [driver.add([n, n + 1, n + 2], max_tokens=30) for n in range(12)]
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    for n, sequence in enumerate(sequences):
        assert output_of(sequence) == reference([n, n + 1, n + 2], 30, seed=SEED)


def test_more_overcommit_runs_more_sequences_at_once():
    most_running = []
    for overcommit in (0.0, 0.8, 1.0):
        driver = Driver.of(num_pages=64, overcommit=overcommit, max_num_seqs=32, token_budget=64)
        for n in range(40):
            driver.add([n, n + 1, n + 2], max_tokens=200)
        most = 0
        while driver.step():
            most = max(most, driver.scheduler.num_running)
        most_running.append(most)
    assert most_running == sorted(most_running)
    assert most_running[0] == 1 < most_running[1] < most_running[2]


def test_the_queue_is_bounded_by_tokens():
    driver = Driver.of(max_num_seqs=1, max_waiting_tokens=50)
    driver.add([1] * 60, max_tokens=2)  # starts with the next step, so it does not count
    driver.add([1] * 40)
    with pytest.raises(QueueFull, match="tokens"):
        driver.add([1] * 20)
    driver.step()
    driver.add([1] * 10)
    with pytest.raises(QueueFull) as caught:
        driver.add([1])
    assert 1 <= caught.value.retry_after_seconds <= 60
    driver.run()


def test_priority_orders_the_queue_until_others_have_waited_long_enough():
    driver = Driver.of(max_num_seqs=1, priority_seconds=10.0, step_seconds=0.0)
    running = driver.add([1], max_tokens=3, ignore_eos=True)
    driver.step()
    waiting = {}
    for now, name, priority in (
        (1, "late", 1),
        (5, "urgent", 0),
        (6, "more urgent", -1),
        (12, "too late", 0),
    ):
        driver.now = float(now)
        waiting[name] = driver.add([2], max_tokens=3, ignore_eos=True, priority=priority)
    driver.run()
    order = [waiting[name] for name in ("more urgent", "urgent", "late", "too late")]
    assert driver.finished == [running, *order]


def test_the_sequence_of_lowest_priority_is_preempted():
    driver = Driver.of(num_pages=12, overcommit=1.0, priority_seconds=10.0)
    low = driver.add([1, 2, 3], max_tokens=30, ignore_eos=True, priority=1)
    driver.step()
    high = driver.add([4, 5, 6], max_tokens=30, ignore_eos=True)
    driver.run()
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)
    assert driver.finished == [high, low]


def test_time_limits_end_waiting_and_running_sequences():
    driver = Driver.of(max_num_seqs=1)
    slow = driver.add([1], max_tokens=50, ignore_eos=True, timeout_seconds=8.0)
    in_time = driver.add([2], max_tokens=2, ignore_eos=True, queue_timeout_seconds=20.0)
    too_late = driver.add([3], max_tokens=2, queue_timeout_seconds=5.0)
    driver.run()
    assert driver.finished == [too_late, slow, in_time]
    assert slow.finish_reason is too_late.finish_reason is FinishReason.ERROR
    assert in_time.finish_reason is FinishReason.LENGTH
    assert slow.num_output_tokens >= 6 and not too_late.has_started
