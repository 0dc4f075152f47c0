"""The scheduler driven by the toy model, by hand. test_scheduler_machine.py drives it at random.

Covers engine/schedule/groups.py.
"""

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


# What is not computed twice


def test_a_second_request_computes_only_tokens_after_the_common_prefix(run_ahead):
    driver = Driver.of(run_ahead=run_ahead)
    common = list(range(30, 43))
    driver.add([*common, 1], max_tokens=4)
    driver.run()
    before = driver.num_prefilled
    second = driver.add([*common, 2, 3], max_tokens=4, ignore_eos=True)
    driver.run()
    assert second.num_cached_tokens == 12, "three full pages of four"
    assert driver.num_prefilled - before == 3
    assert output_of(second) == reference([*common, 2, 3], 4, ignore_eos=True, seed=SEED)
    assert (driver.scheduler.num_queried_tokens, driver.scheduler.num_cached_tokens) == (29, 12)


@pytest.mark.parametrize(("page_size", "cached"), [(1, 15), (4, 12), (16, 0)])
def test_a_full_hit_computes_one_token_or_the_page_it_is_on(page_size, cached):
    driver = Driver.of(page_size=page_size)
    prompt = list(range(16))
    for _ in range(2):
        sequence = driver.add(prompt, max_tokens=3, ignore_eos=True)
        driver.run()
        assert output_of(sequence) == reference(prompt, 3, ignore_eos=True, seed=SEED)
    assert sequence.num_cached_tokens == cached


def test_the_first_chunk_after_a_prefix_hit_is_sized_for_its_context(monkeypatch):
    """A chunk at the end of a prompt takes longer than one at its beginning."""
    driver = Driver.of(max_num_seqs=2, token_budget=64)
    common = list(range(40))
    driver.add([*common, 1], max_tokens=4)
    driver.run()
    num_plans = len(driver.plans)
    monkeypatch.setattr(
        driver.scheduler._budget, "prefill_tokens", lambda num_rows, context: max(30 - context // 2, 5)
    )
    driver.add([*common, *range(50, 80)], max_tokens=2)
    driver.run()
    assert driver.plans[num_plans].query_lens == [10], "30 tokens without context, 10 after 40"


def test_a_conversation_finds_the_pages_of_its_answers(run_ahead):
    driver = Driver.of(run_ahead=run_ahead)
    first = driver.add([1, 2, 3, 4, 5], max_tokens=12, ignore_eos=True)
    driver.run()
    second = driver.add([*first.token_ids, 6, 7], max_tokens=3)
    driver.run()
    assert second.num_cached_tokens == 16, "17 tokens, of which the last was never computed"


def test_computed_pages_are_found_before_their_sequence_ends():
    driver = Driver.of(token_budget=8)
    driver.add(list(range(40)), max_tokens=20, ignore_eos=True)
    for _ in range(8):
        driver.step()
    second = driver.add(list(range(40)), max_tokens=3)
    driver.run()
    assert second.num_cached_tokens == 36


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({}, {"cache_salt": "a"}, {"cache_salt": "b"}),
        ({}, {"cache_salt": "a"}, {}),
        ({}, {"use_prefix_cache": False}, {}),
        ({}, {}, {"use_prefix_cache": False}),
        ({"with_prefix_cache": False}, {}, {}),
    ],
)
def test_no_pages_are_shared_across_salts_or_without_the_prefix_cache(options, first, second):
    driver = Driver.of(**options)
    for own in (first, second):
        sequence = driver.add(list(range(20)), max_tokens=2, **own)
        driver.run()
    assert sequence.num_cached_tokens == 0
    assert driver.num_prefilled == 40


def test_equal_prompts_in_one_step_get_the_right_output(run_ahead):
    driver = Driver.of(run_ahead=run_ahead, token_budget=64)
    sequences = [driver.add(list(range(10)), max_tokens=20, ignore_eos=True) for _ in range(4)]
    driver.run()
    expected = reference(list(range(10)), 20, ignore_eos=True, seed=SEED)
    assert [output_of(sequence) for sequence in sequences] == [expected] * 4
    assert driver.scheduler.pool.num_cached == 7, "kept once"


def test_a_preempted_sequence_finds_its_pages_again():
    driver = Driver.of(num_pages=12, overcommit=1.0)
    sequences = [driver.add([n, n + 1, n + 2], max_tokens=30, ignore_eos=True) for n in range(4)]
    driver.run()
    starts = [
        plan.starts[index]
        for plan in driver.plans
        for index, init in plan.inits.items()
        if init.output_token_ids
    ]
    assert any(start > 0 for start in starts)
    assert all(sequence.num_cached_tokens == 0 for sequence in sequences), "only first starts count"


# Samples of one prompt


@pytest.mark.parametrize("length", [1, 4, 5, 6, 40])
def test_samples_share_a_prompt_and_copy_its_last_page(run_ahead, length):
    driver = Driver.of(run_ahead=run_ahead, token_budget=16)
    prompt = list(range(length))
    samples = driver.add_group(prompt, 3, max_tokens=15, ignore_eos=True)
    driver.run()
    for sample in samples:
        assert output_of(sample) == reference(prompt, 15, ignore_eos=True, seed=sample.seed)
    assert driver.num_prefilled == length + 2, "the followers compute one token each"
    copies = [copy for plan in driver.plans for copy in plan.page_copies]
    assert len(copies) == (2 if (length - 1) % 4 else 0)


def test_samples_start_one_step_after_the_prompt_is_scheduled(run_ahead):
    driver = Driver.of(run_ahead=run_ahead, token_budget=16)
    driver.add_group(list(range(24)), 3, max_tokens=5, ignore_eos=True)
    driver.run()
    assert [len(plan.token_ids) for plan in driver.plans[:4]] == [1, 1, 2, 0]
    assert driver.plans[3].num_decode_rows == 3


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_samples_run_without_their_leader(run_ahead, when):
    driver = Driver.of(run_ahead=run_ahead, token_budget=8, with_prefix_cache=False)
    prompt = list(range(20))
    leader, *followers = driver.add_group(prompt, 3, max_tokens=5, ignore_eos=True)
    for _ in range(when):
        driver.step()
    driver.scheduler.mark(leader.id, FinishReason.ABORT)
    driver.run()
    assert leader.finish_reason is FinishReason.ABORT
    for follower in followers:
        assert output_of(follower) == reference(prompt, 5, ignore_eos=True, seed=follower.seed)


def test_samples_fail_with_the_step_that_computes_their_prompt():
    driver = Driver.of(run_ahead=1)
    samples = driver.add_group(list(range(10)), 3, max_tokens=5)
    driver.launch(fails=True)
    driver.launch()
    driver.commit()
    assert driver.finished == samples
    driver.run()
    assert all(sample.finish_reason is FinishReason.ERROR for sample in samples)


def test_a_group_is_queued_or_refused_as_a_whole():
    driver = Driver.of(max_num_seqs=1, max_waiting=3)
    driver.add_group([1, 2], 3)
    with pytest.raises(QueueFull):
        driver.add_group([1, 2], 2)
    assert driver.scheduler.num_waiting == 3
    driver.run()


# Who may start, and when


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
