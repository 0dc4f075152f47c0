"""The clock of CUDA events, with events whose times are given."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.device.clock import CudaClock


class Device:
    """A device at a given time, in seconds, on a clock of its own."""

    now = 1000.0


class Event:
    """Returns distances as torch does: in milliseconds, rounded to float32."""

    def __init__(self, *, enable_timing: bool):
        assert enable_timing

    def record(self):
        self.seconds = Device.now

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return float(np.float32((later.seconds - self.seconds) * 1e3))


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Device, "now", 1000.0)
    host = SimpleNamespace(now=5.0)
    monkeypatch.setattr("engine.device.clock.time", SimpleNamespace(perf_counter=lambda: host.now))
    return host


def test_events_are_on_the_clock_of_the_host(host):
    clock = CudaClock()
    Device.now += 0.25
    assert clock.seconds(clock.record()) == pytest.approx(5.25, abs=1e-7)


def test_hours_of_steps_do_not_round_the_times(host):
    """The milliseconds of ten hours are multiples of 4 as a float32."""
    clock = CudaClock()
    for _ in range(36_001):
        Device.now += 1.001
        seconds = clock.seconds(clock.record())
    assert seconds == pytest.approx(5.0 + 36_001 * 1.001, abs=1e-4)


def test_both_clocks_are_aligned_again(host):
    clock = CudaClock()
    Device.now, host.now = 2000.0, 1006.0  # the clock of the host was a second faster
    clock.synchronize()
    Device.now += 0.5
    assert clock.seconds(clock.record()) == pytest.approx(1006.5, abs=1e-7)
