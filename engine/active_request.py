"""The engine's state of one running request."""

import time
from dataclasses import dataclass

from engine.mailbox import Mailbox
from engine.outputs import FinishReason
from engine.schedule.sequence import Sequence
from engine.stats import RequestTimes
from engine.stream import RequestStream


@dataclass(slots=True)
class ActiveRequest:
    """A request from submit() to its last delta. Times are seconds of time.perf_counter()."""

    sequence: Sequence
    stream: RequestStream
    mailbox: Mailbox
    arrival: float
    first_token: float | None = None
    last_token: float | None = None

    def times(self, reason: FinishReason) -> RequestTimes:
        """Return the durations of its stages, for a request that ends now."""
        now = time.perf_counter()
        scheduled, first = self.sequence.first_scheduled_seconds, self.first_token
        return RequestTimes(
            finish_reason=reason,
            prompt_tokens=self.sequence.num_prompt_tokens,
            generation_tokens=self.stream.num_output_tokens,
            max_tokens=self.sequence.request.sampling.max_tokens,
            preemptions=self.sequence.num_preemptions,
            end_to_end_seconds=now - self.arrival,
            queue_seconds=None if scheduled is None else scheduled - self.arrival,
            prefill_seconds=None if first is None or scheduled is None else first - scheduled,
            decode_seconds=None if first is None else (self.last_token or first) - first,
            arrival_seconds=self.arrival,
        )
