"""When steps start and end on the device, on the clock the loop reads (time.perf_counter)."""

import time

import torch


class CudaClock:
    """Turns CUDA events into seconds of `time.perf_counter`.

    Times are chained from event to event, since the distance of two events is a float32 of milliseconds and
    loses precision over hours.
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
        """When the device passed `event`, which must be behind the one asked for before."""
        self._anchor_seconds += self._anchor.elapsed_time(event) / 1e3
        self._anchor = event
        return self._anchor_seconds
