"""The scheduler driven by the toy model, by hand. test_scheduler_machine.py drives it at random."""

from collections import Counter
from collections.abc import Callable

import pytest

from engine.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from engine.outputs import FinishReason, StepOutput, StepPlan
from engine.schedule.sequence import RequestChain, Sequence
from tests.engine.driver import SEED, Driver, output_of
from tests.engine.toy import reference


def num_samples(plan: StepPlan) -> int:
    return sum(plan.num_logits)


def test_the_output_is_that_of_the_model(run_ahead):
    driver = Driver.of(run_ahead=run_ahead)
    sequence = driver.add([1, 2, 3, 4, 5], max_tokens=20)
    driver.run()
    assert output_of(sequence) == reference([1, 2, 3, 4, 5], 20, seed=SEED)
    assert sequence.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_no_token_is_computed_past_the_length_limit(run_ahead):
    driver = Driver.of(run_ahead=run_ahead)
    driver.add([1, 2, 3], max_tokens=6, ignore_eos=True)
    driver.run()
    assert sum(map(num_samples, driver.plans)) == 6


def test_eos_drops_the_row_in_flight():
    driver = Driver.of(run_ahead=1)
    prompt = next([a, b] for a in range(90) for b in range(90) if len(reference([a, b], 30, seed=SEED)) == 3)
    sequence = driver.add(prompt, max_tokens=30)
    driver.run()
    assert output_of(sequence) == reference(prompt, 30, seed=SEED)
    assert sequence.finish_reason is FinishReason.STOP
    assert sum(map(num_samples, driver.plans)) == 4, "one row over-runs, no more"


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding(run_ahead):
    driver = Driver.of(token_budget=8, run_ahead=run_ahead)
    short = driver.add([1, 2, 3], max_tokens=12, ignore_eos=True)
    driver.step()
    long = driver.add(list(range(40)), max_tokens=5, ignore_eos=True)
    driver.run()
    assert output_of(short) == reference([1, 2, 3], 12, ignore_eos=True, seed=SEED)
    assert output_of(long) == reference(list(range(40)), 5, ignore_eos=True, seed=SEED)
    mixed = [plan for plan in driver.plans if 0 < plan.num_decode_rows < plan.num_rows]
    assert len(mixed) >= 5, "chunks of the long prompt share steps with the short one's decoding"
    assert all(plan.num_tokens <= 8 for plan in driver.plans)


def test_a_late_short_request_ends_before_an_early_long_one(run_ahead):
    driver = Driver.of(run_ahead=run_ahead)
    long = driver.add([1], max_tokens=60, ignore_eos=True)
    for _ in range(5):
        driver.step()
    short = driver.add([2], max_tokens=3, ignore_eos=True)
    driver.run()
    assert driver.finished == [short, long]


def test_a_chain_keeps_the_rank_of_its_first_request():
    driver = Driver.of(run_ahead=0, max_num_seqs=1, max_waiting=2)
    chain = RequestChain()

    def go_on(prompt: list[int], **limits) -> Sequence:
        return driver.add_group(prompt, 1, 1, chain=chain, **limits)[0]

    steps = [go_on([1, 2, 3], queue_timeout_seconds=0.5)]
    driver.step()
    others = [driver.add([n], max_tokens=1) for n in range(3)]
    with pytest.raises(QueueFull):
        driver.add([9])
    while len(steps) < 6:
        # However late it comes, it was there first: it is next, and has no more to fear from the queue.
        prompt = [*steps[-1].request.prompt_token_ids, 4]
        steps.append(go_on(prompt, queue_timeout_seconds=0.5))
        assert steps[-1].token_ids.tolist() == prompt
        driver.step()
    assert driver.finished == steps
    driver.run()
    assert driver.finished == steps + others
    for step in steps:
        assert output_of(step) == reference(list(step.request.prompt_token_ids), 1, seed=SEED)


def test_only_the_first_request_of_a_chain_is_refused_and_its_time_limit_holds_for_all():
    driver = Driver.of(run_ahead=0, max_num_seqs=1, max_waiting=1)
    chain = RequestChain()

    def go_on() -> None:
        driver.add_group([1, 2, 3], 1, 1, chain=chain, timeout_seconds=1.5)

    others = [driver.add([n], max_tokens=1) for n in range(2)]
    with pytest.raises(QueueFull):
        go_on()
    driver.run()
    for _ in range(2):
        go_on()
        driver.run()
    first, late = driver.finished[len(others) :]
    assert first.finish_reason is FinishReason.LENGTH
    assert late.finish_reason is FinishReason.LENGTH, "1 second after the first came"
    go_on()
    driver.run()
    assert driver.finished[-1].finish_reason is FinishReason.ERROR, "2 seconds after"


def test_preemption_keeps_the_output_and_the_order(run_ahead):
    driver = Driver.of(num_pages=12, run_ahead=run_ahead, overcommit=1.0)
    sequences = [driver.add([n, n + 1, n + 2], max_tokens=30, ignore_eos=True) for n in range(4)]
    driver.run()
    assert driver.scheduler.num_preemptions >= 2
    for n, sequence in enumerate(sequences):
        assert output_of(sequence) == reference([n, n + 1, n + 2], 30, ignore_eos=True, seed=SEED)
    assert driver.finished[0] is sequences[0], "the earliest is never a victim"


def test_abort_works_in_every_state(run_ahead):
    driver = Driver.of(num_pages=16, token_budget=8, max_num_seqs=3, run_ahead=run_ahead)
    waiting_prompt, chunked_prompt = [1, 2], list(range(30))
    decoding = driver.add([3, 4], max_tokens=30, ignore_eos=True)
    driver.step()
    chunked = driver.add(chunked_prompt, max_tokens=30, ignore_eos=True)
    driver.step()
    waiting = [driver.add(waiting_prompt, max_tokens=30) for _ in range(3)]
    for sequence in (waiting[0], chunked, decoding, decoding):
        driver.scheduler.mark(sequence.id, FinishReason.ABORT)
    driver.run()
    assert decoding.finish_reason is chunked.finish_reason is waiting[0].finish_reason is FinishReason.ABORT
    assert Counter(s.id for s in driver.finished).most_common(1)[0][1] == 1, "each ends once"
    assert output_of(waiting[1]) == reference(waiting_prompt, 30, seed=SEED)


# Where a sequence of a 20-token prompt and 9 output tokens can be.
PLACES: dict[str, Callable[[Sequence], bool]] = {
    "waiting": lambda sequence: not sequence.has_started,
    "between chunks": lambda sequence: 0 < sequence.num_scheduled_tokens < 20,
    "decoding": lambda sequence: sequence.num_output_tokens == 4 and sequence.slot >= 0,
    "preempted": lambda sequence: sequence.has_started and sequence.slot < 0,
    "in its last step": lambda sequence: sequence.num_scheduled_tokens == 28 and not sequence.is_finished,
    "ended": lambda sequence: sequence.is_finished,
}


@pytest.mark.parametrize("place", PLACES)
def test_abort_twice_works_in_every_state(run_ahead, place):
    driver = Driver.of(num_pages=16, token_budget=8, run_ahead=run_ahead, overcommit=1.0)
    other = driver.add([5, 6, 7], max_tokens=40, ignore_eos=True)
    sequence = driver.add(list(range(20)), max_tokens=9, ignore_eos=True)
    while not PLACES[place](sequence):
        if len(driver.in_flight) > run_ahead or not driver.launch():
            driver.commit()
        if place == "preempted" and sequence.num_output_tokens == 3:
            driver.scheduler._preempt(sequence)
    num_output = sequence.num_output_tokens
    for _ in range(2):
        driver.scheduler.mark(sequence.id, FinishReason.ABORT)
    driver.step()
    driver.scheduler.mark(sequence.id, FinishReason.ABORT)
    driver.run()
    has_ended = place == "ended"
    assert sequence.finish_reason is (FinishReason.LENGTH if has_ended else FinishReason.ABORT)
    assert sequence.num_output_tokens == num_output, "nothing comes after an abort"
    assert driver.finished.count(sequence) == 1
    assert output_of(other) == reference([5, 6, 7], 40, ignore_eos=True, seed=SEED)


def test_preempted_samples_have_the_output_they_have_alone(run_ahead):
    driver = Driver.of(num_pages=12, run_ahead=run_ahead, overcommit=1.0)
    samples = driver.add_group([1, 2, 3, 4, 5], 4, max_tokens=30, ignore_eos=True)
    driver.run()
    assert driver.scheduler.num_preemptions >= 2
    for sample in samples:
        assert output_of(sample) == reference([1, 2, 3, 4, 5], 30, ignore_eos=True, seed=sample.seed)
        assert driver.finished.count(sample) == 1


def test_abort_of_a_preempted_sequence_with_a_row_in_flight():
    driver = Driver.of(num_pages=6, run_ahead=1, overcommit=1.0)
    driver.add([1, 2, 3], max_tokens=21, ignore_eos=True)
    second = driver.add([4, 5, 6], max_tokens=21, ignore_eos=True)
    while not driver.scheduler.num_preemptions:
        driver.step()
    driver.scheduler.mark(second.id, FinishReason.ABORT)
    driver.run()
    assert second.finish_reason is FinishReason.ABORT
    assert driver.scheduler.pool.num_used == 0


def test_a_stop_string_keeps_only_the_tokens_that_count(run_ahead):
    driver = Driver.of(run_ahead=run_ahead)
    sequence = driver.add([1, 2, 3], max_tokens=30, ignore_eos=True)
    for _ in range(8):
        driver.step()
    assert sequence.num_output_tokens > 3
    driver.scheduler.mark(sequence.id, FinishReason.STOP, stop_reason="xyz", num_output_tokens=3)
    driver.run()
    assert output_of(sequence) == reference([1, 2, 3], 3, ignore_eos=True, seed=SEED)
    assert sequence.stop_reason == "xyz"


def test_stop_token_ids_and_min_tokens():
    expected = reference([5, 6], 20, ignore_eos=True, seed=SEED)
    stop_at = expected[4]
    first = expected.index(stop_at)
    driver = Driver.of()
    stopped = driver.add([5, 6], max_tokens=20, ignore_eos=True, stop_token_ids=frozenset([stop_at]))
    driver.run()
    assert output_of(stopped) == expected[: first + 1]
    assert stopped.stop_reason == stop_at


def test_a_failed_step_ends_its_own_requests_only(run_ahead):
    driver = Driver.of(max_num_seqs=2, run_ahead=run_ahead)
    first, second = driver.add([1], max_tokens=30), driver.add([2], max_tokens=30)
    waiting = driver.add([3], max_tokens=5, ignore_eos=True)
    driver.launch()
    plan, _ = driver.in_flight.popleft()
    assert driver.scheduler.fail(plan) == [first, second]
    driver.run()
    assert first.finish_reason is second.finish_reason is FinishReason.ERROR
    assert output_of(waiting) == reference([3], 5, ignore_eos=True, seed=SEED)


def test_requests_that_can_never_run_are_refused_at_once():
    driver = Driver.of(num_pages=4, page_size=4, max_num_seqs=1, max_waiting=1)
    with pytest.raises(InvalidRequest, match="empty"):
        driver.add([])
    with pytest.raises(ContextLengthExceeded, match="This model's maximum context length is 16 tokens"):
        driver.add([1] * 12, max_tokens=5)
    driver.add([1] * 12, max_tokens=4)
    driver.add([1])
    with pytest.raises(QueueFull):
        driver.add([1])
    driver.run()


def test_more_sequences_than_budget_do_not_starve(run_ahead):
    driver = Driver.of(token_budget=2, max_num_seqs=8, run_ahead=run_ahead)
    sequences = [driver.add([n], max_tokens=10, ignore_eos=True) for n in range(5)]
    driver.run()
    for n, sequence in enumerate(sequences):
        assert output_of(sequence) == reference([n], 10, ignore_eos=True, seed=SEED)


def test_a_step_output_names_its_step():
    driver = Driver.of()
    driver.add([1, 2])
    driver.launch()
    plan, output = driver.in_flight[0]
    assert isinstance(output, StepOutput)
    assert output.step_id == plan.step_id
