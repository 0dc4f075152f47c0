"""The scheduler driven by the toy model: first by hand, then by a state machine."""

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from engine.outputs import FinishReason, StepOutput, StepPlan
from engine.request import Request, SamplingParams
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence
from tests.engine.toy import EOS, ToyRunner, reference


def make_request(prompt: list[int], max_tokens: int, **sampling) -> Request:
    return Request("r", tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling))


@dataclass
class Driver:
    """A scheduler, the toy runner, and at most `run_ahead` steps between launch and commit."""

    num_pages: int = 64
    page_size: int = 4
    run_ahead: int = 1
    max_num_seqs: int = 8
    token_budget: int = 16
    max_waiting: int = 1000
    max_model_len: int | None = None
    in_flight: deque = field(default_factory=deque)
    plans: list[StepPlan] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)

    def __post_init__(self):
        self.scheduler = Scheduler(
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_num_seqs=self.max_num_seqs,
            token_budget=self.token_budget,
            max_model_len=self.max_model_len or self.num_pages * self.page_size,
            max_waiting=self.max_waiting,
            eos_token_ids=frozenset([EOS]),
        )
        self.runner = ToyRunner(self.num_pages, self.page_size)

    def add(self, prompt: list[int], max_tokens: int = 10, **sampling) -> Sequence:
        return self.scheduler.add(make_request(prompt, max_tokens, **sampling), seed=7, now=0.0)

    def launch(self) -> bool:
        self.finished += self.scheduler.reap()
        plan = self.scheduler.plan(now=0.0)
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.runner.launch(plan).output))
        return plan is not None

    def commit(self) -> None:
        plan, output = self.in_flight.popleft()
        self.finished += [s for s, _ in self.scheduler.commit(plan, output) if s.is_finished]

    def step(self) -> bool:
        """What the engine's loop does once; False when there is nothing left to do."""
        launched = self.launch()
        if self.in_flight and (not launched or len(self.in_flight) > self.run_ahead):
            self.commit()
            return True
        return launched

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                self.scheduler.check_idle()
                return
        pytest.fail(
            f"not done after {max_steps} steps: {self.scheduler.num_waiting=} {self.scheduler.num_running=}"
        )


def num_samples(plan: StepPlan) -> int:
    return len(plan.decode.slots) + sum(row.sample for row in plan.chunks)


def output_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


@pytest.fixture(params=[0, 1], ids=["run_ahead_0", "run_ahead_1"])
def run_ahead(request):
    return request.param


def test_one_sequence_gets_the_models_tokens(run_ahead):
    driver = Driver(run_ahead=run_ahead)
    sequence = driver.add([1, 2, 3, 4, 5], max_tokens=20)
    driver.run()
    assert output_of(sequence) == reference([1, 2, 3, 4, 5], 20, seed=7)
    assert sequence.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_a_length_stop_is_never_over_run(run_ahead):
    driver = Driver(run_ahead=run_ahead)
    driver.add([1, 2, 3], max_tokens=6, ignore_eos=True)
    driver.run()
    assert sum(map(num_samples, driver.plans)) == 6


def test_eos_drops_the_row_in_flight():
    driver = Driver(run_ahead=1)
    prompt = next([a, b] for a in range(90) for b in range(90) if len(reference([a, b], 30, seed=7)) == 3)
    sequence = driver.add(prompt, max_tokens=30)
    driver.run()
    assert output_of(sequence) == reference(prompt, 30, seed=7)
    assert sequence.finish_reason is FinishReason.STOP
    assert sum(map(num_samples, driver.plans)) == 4, "one row over-runs, no more"


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding(run_ahead):
    driver = Driver(token_budget=8, run_ahead=run_ahead)
    short = driver.add([1, 2, 3], max_tokens=12, ignore_eos=True)
    driver.step()
    long = driver.add(list(range(40)), max_tokens=5, ignore_eos=True)
    driver.run()
    assert output_of(short) == reference([1, 2, 3], 12, ignore_eos=True, seed=7)
    assert output_of(long) == reference(list(range(40)), 5, ignore_eos=True, seed=7)
    mixed = [plan for plan in driver.plans if plan.decode.slots and plan.chunks]
    assert len(mixed) >= 5, "chunks of the long prompt share steps with the short one's decoding"
    assert all(plan.num_tokens <= 8 for plan in driver.plans)


def test_a_late_short_request_ends_before_an_early_long_one(run_ahead):
    driver = Driver(run_ahead=run_ahead)
    long = driver.add([1], max_tokens=60, ignore_eos=True)
    for _ in range(5):
        driver.step()
    short = driver.add([2], max_tokens=3, ignore_eos=True)
    driver.run()
    assert driver.finished == [short, long]


def test_preemption_keeps_the_output_and_the_order(run_ahead):
    driver = Driver(num_pages=12, run_ahead=run_ahead)
    sequences = [driver.add([n, n + 1, n + 2], max_tokens=30, ignore_eos=True) for n in range(4)]
    driver.run()
    assert driver.scheduler.num_preemptions >= 2
    for n, sequence in enumerate(sequences):
        assert output_of(sequence) == reference([n, n + 1, n + 2], 30, ignore_eos=True, seed=7)
    assert driver.finished[0] is sequences[0], "the earliest is never a victim"


def test_abort_works_in_every_place(run_ahead):
    driver = Driver(num_pages=16, token_budget=8, max_num_seqs=3, run_ahead=run_ahead)
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
    assert output_of(waiting[1]) == reference(waiting_prompt, 30, seed=7)


def test_abort_of_a_preempted_sequence_with_a_row_in_flight():
    driver = Driver(num_pages=6, run_ahead=1)
    driver.add([1, 2, 3], max_tokens=21, ignore_eos=True)
    second = driver.add([4, 5, 6], max_tokens=21, ignore_eos=True)
    while not driver.scheduler.num_preemptions:
        driver.step()
    driver.scheduler.mark(second.id, FinishReason.ABORT)
    driver.run()
    assert second.finish_reason is FinishReason.ABORT
    assert driver.scheduler.pool.num_used == 0


def test_a_stop_string_keeps_only_the_tokens_that_count(run_ahead):
    driver = Driver(run_ahead=run_ahead)
    sequence = driver.add([1, 2, 3], max_tokens=30, ignore_eos=True)
    for _ in range(8):
        driver.step()
    assert sequence.num_output_tokens > 3
    driver.scheduler.mark(sequence.id, FinishReason.STOP, stop_reason="xyz", num_output_tokens=3)
    driver.run()
    assert output_of(sequence) == reference([1, 2, 3], 3, ignore_eos=True, seed=7)
    assert sequence.stop_reason == "xyz"


def test_stop_token_ids_and_min_tokens():
    expected = reference([5, 6], 20, ignore_eos=True, seed=7)
    stop_at = expected[4]
    first = expected.index(stop_at)
    driver = Driver()
    stopped = driver.add([5, 6], max_tokens=20, ignore_eos=True, stop_token_ids=frozenset([stop_at]))
    driver.run()
    assert output_of(stopped) == expected[: first + 1]
    assert stopped.stop_reason == stop_at


def test_a_failed_step_ends_its_own_requests_only(run_ahead):
    driver = Driver(max_num_seqs=2, run_ahead=run_ahead)
    first, second = driver.add([1], max_tokens=30), driver.add([2], max_tokens=30)
    waiting = driver.add([3], max_tokens=5, ignore_eos=True)
    driver.launch()
    plan, _ = driver.in_flight.popleft()
    assert driver.scheduler.fail(plan) == [first, second]
    driver.run()
    assert first.finish_reason is second.finish_reason is FinishReason.ERROR
    assert output_of(waiting) == reference([3], 5, ignore_eos=True, seed=7)


def test_what_can_never_run_is_refused_at_once():
    driver = Driver(num_pages=4, page_size=4, max_num_seqs=1, max_waiting=1)
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
    driver = Driver(token_budget=2, max_num_seqs=8, run_ahead=run_ahead)
    sequences = [driver.add([n], max_tokens=10, ignore_eos=True) for n in range(5)]
    driver.run()
    for n, sequence in enumerate(sequences):
        assert output_of(sequence) == reference([n], 10, ignore_eos=True, seed=7)


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, step, abort, stop and fail in any order; every request must end once, with the right tokens."""

    run_ahead = 0

    def __init__(self):
        super().__init__()
        self.driver = Driver(
            num_pages=10,
            page_size=2,
            token_budget=5,
            max_num_seqs=4,
            max_waiting=20,
            run_ahead=self.run_ahead,
        )
        self.sequences: list[Sequence] = []
        self.stopped_at: dict[int, int] = {}

    def _unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @rule(
        prompt=st.lists(st.integers(0, 90), min_size=1, max_size=12),
        max_tokens=st.integers(1, 8),
        ignore_eos=st.booleans(),
    )
    def submit(self, prompt, max_tokens, ignore_eos):
        try:
            self.sequences.append(self.driver.add(prompt, max_tokens, ignore_eos=ignore_eos))
        except QueueFull:
            assert self.driver.scheduler.num_waiting >= 20

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.run_ahead and len(self.driver.in_flight) <= self.run_ahead)
    @rule()
    def launch_only(self):
        self.driver.launch()

    @precondition(_unfinished)
    @rule(index=st.integers(0, 100))
    def abort(self, index):
        unfinished = self._unfinished()
        self.driver.scheduler.mark(unfinished[index % len(unfinished)].id, FinishReason.ABORT)

    @precondition(_unfinished)
    @rule(index=st.integers(0, 100), count=st.integers(1, 8))
    def stop(self, index, count):
        unfinished = self._unfinished()
        sequence = unfinished[index % len(unfinished)]
        if sequence.num_output_tokens >= count and sequence.id not in self.driver.scheduler._marks:
            self.driver.scheduler.mark(
                sequence.id, FinishReason.STOP, stop_reason="stop", num_output_tokens=count
            )
            self.stopped_at[sequence.id] = count

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def fail_step(self):
        plan, _ = self.driver.in_flight.popleft()
        self.driver.finished += self.driver.scheduler.fail(plan)

    @invariant()
    def pages_add_up(self):
        scheduler = self.driver.scheduler
        held = [page for sequence in scheduler._running for page in sequence.pages]
        assert len(held) == len(set(held)), "a page is in two hands"
        assert scheduler.pool.num_used == len(held)
        assert scheduler.num_running <= 4
        slots = [sequence.slot for sequence in scheduler._running]
        assert len(slots) == len(set(slots))

    @invariant()
    def counts_are_consistent(self):
        for sequence in self.driver.scheduler._running:
            assert sequence.num_computed_tokens <= sequence.num_scheduled_tokens
            assert sequence.num_scheduled_tokens <= sequence.num_tokens + sequence.num_rows_in_flight
            assert len(sequence.pages) >= self.driver.scheduler.pool.pages_for(sequence.num_scheduled_tokens)

    def teardown(self):
        self.driver.run(max_steps=2_000)
        ended = Counter(sequence.id for sequence in self.driver.finished)
        assert all(ended[sequence.id] == 1 for sequence in self.sequences), "every request ends exactly once"
        for sequence in self.sequences:
            sampling = sequence.request.sampling
            prompt = list(sequence.request.prompt_token_ids)
            whole = reference(prompt, sampling.max_tokens, ignore_eos=sampling.ignore_eos, seed=7)
            output = output_of(sequence)
            if sequence.finish_reason is FinishReason.STOP and sequence.stop_reason == "stop":
                assert output == whole[: self.stopped_at[sequence.id]]
            elif sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert output == whole
            else:
                assert output == whole[: len(output)]


class RunAheadMachine(SchedulerMachine):
    run_ahead = 1


TestRunAhead0 = SchedulerMachine.TestCase
TestRunAhead1 = RunAheadMachine.TestCase
TestRunAhead0.settings = TestRunAhead1.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None
)


def test_a_step_output_names_its_step():
    driver = Driver()
    driver.add([1, 2])
    driver.launch()
    plan, output = driver.in_flight[0]
    assert isinstance(output, StepOutput)
    assert output.step_id == plan.step_id
