"""The queue of waiting sequences: its order, its limits, and the time limits of sequences.

The order is given by one number per sequence, its rank, smaller first: its arrival time plus `aging_seconds`
for each unit of its priority. So sequences of equal priority start in the order of arrival, and a sequence of
priority 1 is overtaken by those of priority 0 that arrive within `aging_seconds` after it and by no later
ones. All age at the same rate: the order of two never changes, nothing is sorted again, and no sequence
starves.
"""

import heapq
from collections import abc, deque

from engine.errors import QueueFull
from engine.request import Request
from engine.schedule.sequence import Sequence, SequenceStatus

NUM_STARTS_REMEMBERED = 64
MAX_RETRY_AFTER_SECONDS = 60


class WaitingQueue:
    """A heap of waiting sequences, bounded by `max_waiting` of them and by `max_waiting_tokens`.

    The entry of a sequence that ends while it waits stays in the heap and is skipped later.
    """

    def __init__(self, aging_seconds: float, max_waiting: int, max_waiting_tokens: int | None = None) -> None:
        self._aging_seconds = aging_seconds
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._heap: list[tuple[float, int, Sequence]] = []
        self._parked: dict[int, list[Sequence]] = {}
        self._tokens: dict[int, int] = {}
        self._starts: deque[float] = deque(maxlen=NUM_STARTS_REMEMBERED)
        self.num_waiting_tokens = 0

    @property
    def num_waiting(self) -> int:
        """The number of waiting sequences, parked ones included."""
        return len(self._tokens)

    def rank(self, arrival_seconds: float, priority: int) -> float:
        """Return the number that orders a sequence, in seconds; smaller ones start first."""
        return arrival_seconds + self._aging_seconds * priority

    def check_room(self, requests: abc.Sequence[Request], *, num_starting: int, now: float) -> None:
        """Raise QueueFull if requests with one prompt would exceed a limit of the queue.

        `num_starting` waiting sequences need not be counted, because they wait for the next step only. Their
        prompts are assumed to have the average length.
        """
        num_waiting = self.num_waiting
        share = max(0, num_waiting - num_starting) / max(1, num_waiting)
        num_waiting_tokens = int(self.num_waiting_tokens * share)
        if num_waiting + len(requests) > self._max_waiting + num_starting:
            message = f"{num_waiting} requests are waiting already; the limit is {self._max_waiting}."
        elif (
            self._max_waiting_tokens is not None
            and num_waiting >= max(1, num_starting)
            and num_waiting_tokens + len(requests[0].prompt_token_ids) > self._max_waiting_tokens
        ):
            message = f"{num_waiting_tokens} tokens are waiting already, near the limit."
        else:
            return
        raise QueueFull(message, self.retry_after_seconds(now))

    def push(self, sequence: Sequence) -> None:
        """Insert a new or a preempted sequence by its rank."""
        self._count(sequence, sequence.num_tokens)
        heapq.heappush(self._heap, (sequence.rank, sequence.id, sequence))

    def park(self, leader: Sequence, followers: list[Sequence]) -> None:
        """Add sequences outside the order until release(). Their tokens do not count: the leader's do."""
        for sequence in followers:
            self._count(sequence, 0)
        self._parked[leader.id] = followers

    def release(self, leader: Sequence) -> list[Sequence]:
        """Insert the sequences parked for a leader by their ranks; return them."""
        followers = self._parked.pop(leader.id, [])
        released = [sequence for sequence in followers if sequence.id in self._tokens]
        for sequence in released:
            heapq.heappush(self._heap, (sequence.rank, sequence.id, sequence))
        return released

    def head(self) -> Sequence | None:
        """Return the waiting sequence that is next, or None."""
        while self._heap:
            sequence = self._heap[0][2]
            if sequence.status is SequenceStatus.WAITING:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self, now: float) -> Sequence:
        """Remove the head, which starts `now`, and return it. There must be one."""
        sequence = heapq.heappop(self._heap)[2]
        if not sequence.is_continuing:
            self._starts.append(now)
        self.discard(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence. Its entry stays in the heap until there are many such entries."""
        self.num_waiting_tokens -= self._tokens.pop(sequence.id)
        if len(self._heap) > 64 + 2 * len(self._tokens):
            self._heap = [entry for entry in self._heap if entry[1] in self._tokens]
            heapq.heapify(self._heap)

    def retry_after_seconds(self, now: float) -> int:
        """Estimate when a tenth of the queue will have started, from recent starts; 1 to 60 seconds."""
        if len(self._starts) < 2:
            return 1
        seconds_per_start = (now - self._starts[0]) / len(self._starts)
        return round(min(max(1.0, self.num_waiting / 10 * seconds_per_start), MAX_RETRY_AFTER_SECONDS))

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        self._tokens[sequence.id] = num_tokens
        self.num_waiting_tokens += num_tokens


class Deadlines:
    """A heap of the time limits of sequences: on their waiting, and on their whole life."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool]] = []

    def add(self, sequence: Sequence) -> None:
        """Add the time limits of a sequence, if it has any."""
        request, arrival = sequence.request, sequence.arrival_seconds
        if request.queue_timeout_seconds is not None and not sequence.is_continuing:
            heapq.heappush(self._heap, (arrival + request.queue_timeout_seconds, sequence.id, True))
        if request.timeout_seconds is not None:
            heapq.heappush(self._heap, (arrival + request.timeout_seconds, sequence.id, False))

    def pop_expired(self, now: float, sequences: abc.Mapping[int, Sequence]) -> list[tuple[Sequence, bool]]:
        """Return those of `sequences` that are past a limit, each once; True if it limits their waiting."""
        late: dict[int, tuple[Sequence, bool]] = {}
        while self._heap and self._heap[0][0] <= now:
            _, sequence_id, is_waiting_limit = heapq.heappop(self._heap)
            sequence = sequences.get(sequence_id)
            if sequence is not None and not (is_waiting_limit and sequence.has_started):
                late.setdefault(sequence_id, (sequence, is_waiting_limit))
        return list(late.values())
