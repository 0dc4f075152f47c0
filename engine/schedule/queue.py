"""Who waits, in which order, and for how long at most.

The order is one number for each sequence, smaller first: its arrival, plus `aging_seconds` for each unit of
its priority. So among equals the first comes first, and a sequence of priority 1 is overtaken by those of
priority 0 that arrive within `aging_seconds` after it and by no later ones. All age at the same rate: the
order of two never changes, nothing is sorted again, and nobody starves.
"""

import heapq
from collections import deque
from collections.abc import Mapping

from engine.schedule.sequence import Sequence, SequenceStatus

NUM_STARTS_REMEMBERED = 64
MAX_RETRY_AFTER_SECONDS = 60


class WaitingQueue:
    """A heap of waiting sequences. Entries of those that end while they wait are skipped later."""

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._heap: list[tuple[float, int, Sequence]] = []
        self._parked: dict[int, list[Sequence]] = {}
        self._tokens: dict[int, int] = {}
        self._starts: deque[float] = deque(maxlen=NUM_STARTS_REMEMBERED)
        self.num_waiting_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, in the order or parked."""
        return len(self._tokens)

    def rank(self, arrival_seconds: float, priority: int) -> float:
        """The place of a sequence in the order."""
        return arrival_seconds + self._aging_seconds * priority

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait, for the first time or again."""
        self._count(sequence, sequence.num_tokens)
        heapq.heappush(self._heap, (sequence.rank, sequence.id, sequence))

    def park(self, leader: Sequence, followers: list[Sequence]) -> None:
        """Let sequences wait beside the order, until `release`. They will share the leader's tokens."""
        for sequence in followers:
            self._count(sequence, 0)
        self._parked[leader.id] = followers

    def release(self, leader: Sequence) -> list[Sequence]:
        """Put those parked for a leader into the order; returns them."""
        followers = self._parked.pop(leader.id, [])
        released = [sequence for sequence in followers if sequence.id in self._tokens]
        for sequence in released:
            heapq.heappush(self._heap, (sequence.rank, sequence.id, sequence))
        return released

    def head(self) -> Sequence | None:
        """Whose turn it is."""
        while self._heap:
            sequence = self._heap[0][2]
            if sequence.status is SequenceStatus.WAITING:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self, now: float) -> Sequence:
        """Take the head: it starts."""
        sequence = heapq.heappop(self._heap)[2]
        if not sequence.is_continuing:
            self._starts.append(now)
        self.discard(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """A sequence waits no longer. Its entry is swept out when there are many such."""
        self.num_waiting_tokens -= self._tokens.pop(sequence.id)
        if len(self._heap) > 64 + 2 * len(self._tokens):
            self._heap = [entry for entry in self._heap if entry[1] in self._tokens]
            heapq.heapify(self._heap)

    def retry_after_seconds(self, now: float) -> int:
        """When a tenth of the queue will have moved on, at the rate of late; 1 to 60 seconds."""
        if len(self._starts) < 2:
            return 1
        seconds_per_start = (now - self._starts[0]) / len(self._starts)
        return round(min(max(1.0, self.num_waiting / 10 * seconds_per_start), MAX_RETRY_AFTER_SECONDS))

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        self._tokens[sequence.id] = num_tokens
        self.num_waiting_tokens += num_tokens


class Deadlines:
    """When sequences will have waited, or lived, too long."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool]] = []

    def add(self, sequence: Sequence) -> None:
        """Mind the time limits of a sequence, if it has any."""
        request, arrival = sequence.request, sequence.arrival_seconds
        if request.queue_timeout_seconds is not None and not sequence.is_continuing:
            heapq.heappush(self._heap, (arrival + request.queue_timeout_seconds, sequence.id, True))
        if request.timeout_seconds is not None:
            heapq.heappush(self._heap, (arrival + request.timeout_seconds, sequence.id, False))

    def pop_expired(self, now: float, sequences: Mapping[int, Sequence]) -> list[tuple[Sequence, bool]]:
        """Those of `sequences` that are over a limit, once each; True: it is that for their start."""
        late: dict[int, tuple[Sequence, bool]] = {}
        while self._heap and self._heap[0][0] <= now:
            _, sequence_id, is_for_start = heapq.heappop(self._heap)
            sequence = sequences.get(sequence_id)
            if sequence is not None and not (is_for_start and sequence.has_started):
                late.setdefault(sequence_id, (sequence, is_for_start))
        return list(late.values())
