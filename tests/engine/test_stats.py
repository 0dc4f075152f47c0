import pytest

from engine.stats import WINDOW_SECONDS, IdleMeter


def test_gaps_count_only_while_work_waits():
    meter = IdleMeter(0.0)
    meter.work_arrived(10.0)
    meter.work_arrived(10.5)
    meter.step(11.0, 12.0)  # 1 s after the work arrived
    meter.step(12.25, 13.0)  # 0.25 s after the step before
    meter.work_ended()
    meter.work_arrived(20.0)
    meter.step(20.0, 21.0)
    assert meter.total_seconds == pytest.approx(1.25)
    assert meter.share(25.0) == pytest.approx(1.25 / 25.0)


def test_the_share_forgets_old_gaps():
    meter = IdleMeter(0.0)
    meter.work_arrived(1.0)
    meter.step(4.0, 5.0)
    assert meter.share(10.0) == pytest.approx(0.3)
    assert meter.share(6.0 + WINDOW_SECONDS) == 0.0
    assert meter.total_seconds == pytest.approx(3.0)


def test_steps_that_overlap_leave_no_gap():
    meter = IdleMeter(0.0)
    meter.work_arrived(0.0)
    meter.step(0.0, 2.0)
    meter.step(1.5, 3.0)
    assert meter.total_seconds == 0.0
