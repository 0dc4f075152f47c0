from array import array
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request, SamplingParams
from engine.schedule.queue import Deadlines, WaitingQueue
from engine.schedule.sequence import Sequence, SequenceStatus

IDS = count()


def make(
    queue: WaitingQueue, arrival: float = 0.0, priority: int = 0, num_tokens: int = 1, **limits
) -> Sequence:
    request = Request("r", (1,) * num_tokens, SamplingParams(max_tokens=1), priority=priority, **limits)
    return Sequence(
        id=next(IDS),
        request=request,
        seed=0,
        arrival_seconds=arrival,
        rank=queue.rank(arrival, priority),
        token_ids=array("i", request.prompt_token_ids),
        num_prompt_tokens=num_tokens,
        max_num_tokens=num_tokens + 1,
        final_token_ids=frozenset(),
    )


def order_of(queue: WaitingQueue) -> list[Sequence]:
    order = []
    while queue.head() is not None:
        order.append(queue.pop(0.0))
        order[-1].status = SequenceStatus.RUNNING
    return order


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-3, 3)), max_size=30), st.sampled_from([0.0, 5.0]))
def test_order_is_arrival_plus_priority(arrivals, aging_seconds):
    queue = WaitingQueue(aging_seconds, 1000)
    sequences = [make(queue, float(arrival), priority) for arrival, priority in arrivals]
    for sequence in reversed(sequences):
        queue.push(sequence)
    expected = sorted(sequences, key=lambda s: (s.arrival_seconds + aging_seconds * s.request.priority, s.id))
    assert order_of(queue) == expected
    assert (queue.num_waiting, queue.num_waiting_tokens) == (0, 0)


def test_ended_sequences_are_skipped_and_removed_in_bulk():
    queue = WaitingQueue(0.0, 1000)
    sequences = [make(queue, float(number), num_tokens=3) for number in range(1000)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[:990]:
        queue.discard(sequence)
        sequence.status = SequenceStatus.FINISHED
    assert (queue.num_waiting, queue.num_waiting_tokens) == (10, 30)
    assert len(queue._heap) < 100
    assert order_of(queue) == sequences[990:]


def test_parked_followers_are_outside_the_order_and_add_no_tokens():
    queue = WaitingQueue(0.0, 1000)
    leader, first, second, later = (make(queue, float(number), num_tokens=5) for number in range(4))
    queue.push(leader)
    queue.park(leader, [first, second])
    queue.push(later)
    assert (queue.num_waiting, queue.num_waiting_tokens) == (4, 10)
    assert queue.pop(0.0) is leader
    leader.status = SequenceStatus.RUNNING
    assert queue.head() is later
    queue.discard(first)
    first.status = SequenceStatus.FINISHED
    assert queue.release(leader) == [second]
    assert queue.release(leader) == []
    assert order_of(queue) == [second, later]


def test_retry_after_is_the_time_for_a_tenth_of_the_queue():
    queue = WaitingQueue(0.0, 1000)
    assert queue.retry_after_seconds(0.0) == 1, "nothing is known"
    sequences = [make(queue, 0.0) for _ in range(300)]
    for sequence in sequences:
        queue.push(sequence)
    for number in range(100):
        queue.pop(number * 0.5).status = SequenceStatus.RUNNING
    assert queue.retry_after_seconds(49.5) == 10, "a tenth of the 200 that wait, at two a second"
    assert queue.retry_after_seconds(2000.0) == 60


def test_each_expired_sequence_is_returned_once():
    queue, deadlines = WaitingQueue(0.0, 1000), Deadlines()
    both = make(queue, 10.0, queue_timeout_seconds=2.0, timeout_seconds=2.0)
    started = make(queue, 10.0, queue_timeout_seconds=2.0, timeout_seconds=5.0)
    started.first_scheduled_seconds = 11.0
    free, gone = make(queue, 10.0), make(queue, 10.0, timeout_seconds=1.0)
    for sequence in (both, started, free, gone):
        deadlines.add(sequence)
    known = {sequence.id: sequence for sequence in (both, started, free)}
    assert deadlines.pop_expired(11.9, known) == []
    assert [sequence for sequence, _ in deadlines.pop_expired(12.0, known)] == [both]
    assert deadlines.pop_expired(14.9, known) == []
    assert deadlines.pop_expired(99.0, known) == [(started, False)]
