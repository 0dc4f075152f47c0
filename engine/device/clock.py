"""Converts CUDA events to the clock that the loop reads, time.perf_counter."""

import time

import torch


class CudaClock:
    """Turns CUDA events into seconds of `time.perf_counter`.

    Times are chained from event to event: torch returns the distance of two events as a float32 of
    milliseconds, which loses precision over hours.
    """

    def __init__(self) -> None:
        self._anchor = self.record()
        self._anchor_seconds = 0.0
        self.synchronize()

    def record(self) -> torch.cuda.Event:
        """Mark this place in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Align both clocks. Waits for the stream, so call it when the device has nothing to do."""
        self._anchor = self.record()
        self._anchor.synchronize()
        self._anchor_seconds = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float:
        """Return when the device passed `event`, which must be later than that of the call before."""
        self._anchor_seconds += self._anchor.elapsed_time(event) / 1e3
        self._anchor = event
        return self._anchor_seconds
