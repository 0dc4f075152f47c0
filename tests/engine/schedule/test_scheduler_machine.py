"""The scheduler, its pages, its queue and its tree, driven at random against an unbatched toy model.

make test-long (--hypothesis-profile=long) drives ten times as far.

Covers engine/schedule/rows.py.
"""

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import QueueFull
from engine.outputs import NO_PAGE, FinishReason
from engine.readouts import PromptLogprobs
from engine.schedule.sequence import RequestChain, Sequence, SequenceStatus
from tests.engine.driver import Driver, output_of
from tests.engine.toy import LONG_MARK, VOCAB_SIZE, next_token, reference

MAX_WAITING = 20
MAX_RUNNING = 5
NUM_PAGES = 24
MAX_DRAFTS = 3
IS_LONG = settings.get_current_profile_name() == "long"
COUNTS: Counter[str] = Counter()
EVENTS = (
    "preempted",
    "hit",
    "evicted",
    "copied",
    "timed out",
    "failed",
    "resumed",
    "shared",
    "full hit",
    "drafted",
)


class SchedulerMachine(RuleBasedStateMachine):
    """Apply all events in any order; every request must end once, with the tokens it has alone."""

    run_ahead = 0
    kv_windows: tuple[int, ...] = (0,)
    short_context: int | None = None
    num_pages = NUM_PAGES
    max_model_len = 24
    counts: ClassVar[Counter[str]] = COUNTS
    prompt_factor = 1
    max_token_budget = 9
    num_steps_beyond = 1  # launched beside `run_ahead`, before step() launches one more

    @initialize(
        page_size=st.sampled_from([1, 2, 3]),
        overcommit=st.sampled_from([0.0, 0.5, 1.0, 1.0]),
        priority_seconds=st.sampled_from([0.0, 3.0]),
        token_budget=st.sampled_from([5, 9]),
        target_seconds=st.sampled_from([None, 0.5]),
        num_drafts=st.sampled_from([0, 0, 1, MAX_DRAFTS]),
    )
    def begin(self, page_size, overcommit, priority_seconds, token_budget, target_seconds, num_drafts):
        self.num_drafts = num_drafts
        self.driver = Driver.of(
            num_pages=self.num_pages,
            page_size=page_size,
            run_ahead=self.run_ahead,
            max_num_seqs=MAX_RUNNING,
            max_model_len=self.max_model_len,
            kv_windows=self.kv_windows,
            short_context=self.short_context,
            max_waiting=MAX_WAITING,
            token_budget=min(token_budget, self.max_token_budget),
            overcommit=overcommit,
            priority_seconds=priority_seconds,
            target_step_seconds=target_seconds,
        )
        self.scheduler = self.driver.scheduler
        self.is_safe = overcommit == 0.0
        self.sequences: list[Sequence] = []
        self.stopped_at: dict[int, int] = {}

    def _unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    # Rules

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(0, 12),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        ignore_eos=st.booleans(),
        use_prefix_cache=st.sampled_from([True, True, True, False]),
        cache_salt=st.sampled_from([None, None, "salt"]),
        priority=st.integers(-1, 1),
        timeout=st.sampled_from([None, None, None, None, 9.0]),
        in_chain=st.sampled_from([False, False, True]),
    )
    def submit(self, prompt, n, max_tokens, prompt_logprobs, in_chain, **options):
        self.counts["submit"] += 1
        if prompt_logprobs is not None:
            options["readouts"] = (PromptLogprobs(prompt_logprobs),)
        options["chain"] = RequestChain() if in_chain and n == 1 else None
        timeout = options.pop("timeout")
        options |= {"timeout_seconds": timeout, "queue_timeout_seconds": timeout and timeout / 2}
        try:
            prompt = prompt * self.prompt_factor
            self.sequences += self.driver.add_group(prompt, n, max_tokens, **options)
        except QueueFull:
            assert self.scheduler.num_waiting + n > MAX_WAITING
        self.counts["fork"] += n > 1

    def _ends_of_chains(self) -> list[Sequence]:
        """Return the sequences of chains that have output and can be continued."""
        return [s for s in self.sequences if s.chain and s.num_output_tokens and s.num_tokens < 20]

    @precondition(_ends_of_chains)
    @rule(
        index=st.integers(0, 100),
        width=st.integers(1, 3),
        max_tokens=st.integers(1, 4),
        timeout=st.sampled_from([None, None, None, None, 9.0]),
    )
    def go_on(self, index, width, max_tokens, timeout):
        """Add later requests of a chain: none is refused, and all have the rank of the first."""
        self.counts["go_on"] += 1
        ends = self._ends_of_chains()
        end = ends[index % len(ends)]
        assert end.chain is not None
        for last in range(width):
            prompt = [*end.token_ids[:-1], last]
            options = {"priority": 1, "timeout_seconds": timeout, "queue_timeout_seconds": 0.0}
            [step] = self.driver.add_group(prompt, 1, max_tokens, chain=end.chain, **options)
            assert (step.rank, step.token_ids.tolist()) == (end.chain.first.rank, prompt)
            self.sequences.append(step)

    @precondition(_unfinished)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        self.counts["step"] += 1
        self._run(count)

    @precondition(_unfinished)
    @rule(count=st.integers(6, 12))
    def step_often(self, count):
        self.counts["step_often"] += 1
        self._run(count)

    def _run(self, count: int) -> None:
        for _ in range(count):
            is_busy = bool(self._unfinished())
            self._draft()
            assert self.driver.step() or not is_busy or not self._unfinished(), "nothing can go on"
            self._look_at_the_newest_plan()

    @precondition(
        lambda self: (
            self._unfinished() and len(self.driver.in_flight) < self.run_ahead + self.num_steps_beyond
        )
    )
    @rule(fails=st.sampled_from([False, False, False, True]))
    def launch_only(self, fails):
        self.counts["launch_only"] += 1
        self.driver.launch(fails=fails)
        self._look_at_the_newest_plan()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def commit_only(self):
        self.counts["commit_only"] += 1
        self.driver.commit()

    @precondition(_unfinished)
    @rule(index=st.integers(0, 100))
    def abort(self, index):
        self.counts["abort"] += 1
        unfinished = self._unfinished()
        self.scheduler.mark(unfinished[index % len(unfinished)].id, FinishReason.ABORT)

    def _writing(self) -> list[Sequence]:
        """Return the unfinished sequences that have output and no mark."""
        return [s for s in self._unfinished() if s.num_output_tokens and s.id not in self.scheduler._marks]

    @precondition(_writing)
    @rule(index=st.integers(0, 100), back=st.integers(0, 3))
    def finish(self, index, back):
        """Mark a sequence whose output has a stop string some tokens back."""
        self.counts["finish"] += 1
        writing = self._writing()
        sequence = writing[index % len(writing)]
        count = max(1, sequence.num_output_tokens - back)
        self.scheduler.mark(sequence.id, FinishReason.STOP, stop_reason="s", num_output_tokens=count)
        self.stopped_at[sequence.id] = count

    def _decoding(self) -> list[Sequence]:
        return [s for s in self.scheduler._running if s.num_output_tokens]

    def _draft(self) -> None:
        """Draft the next tokens of all decoding sequences: the first ones right, the others wrong."""
        if not self.num_drafts:
            return
        while self.driver.in_flight:
            self.driver.commit()
        for sequence in self._decoding():
            tokens = sequence.token_ids.tolist()
            num_right = (sequence.id + len(tokens)) % (self.num_drafts + 1)
            for place in range(self.num_drafts):
                right = next_token(tokens, sequence.seed, self.kv_windows)
                tokens.append(right if place < num_right else (right + 1) % VOCAB_SIZE)
            sequence.draft_token_ids = tuple(tokens[sequence.num_tokens :])

    @precondition(lambda self: self.scheduler.num_running and not self.is_safe)
    @rule()
    def preempt(self):
        self.counts["preempt"] += 1
        self.scheduler._preempt(self.scheduler._running[-1])

    @precondition(lambda self: self.scheduler.pool.num_cached > NUM_PAGES // 3)
    @rule(count=st.integers(1, 6))
    def evict(self, count):
        self.counts["evict"] += 1
        pool = self.scheduler.pool
        free, cached = pool.num_free, pool.num_cached
        self.scheduler.prefix_cache.evict(count)
        expected = min(count, cached), min(count + len(self.kv_windows) - 1, cached)
        assert expected[0] <= pool.num_free - free <= expected[1], "cached pages can be had, in whole columns"

    @precondition(lambda self: any(s.request.timeout_seconds for s in self._unfinished()))
    @rule(seconds=st.integers(1, 3))
    def let_time_pass(self, seconds):
        self.counts["let_time_pass"] += 1
        self.driver.now += seconds

    def _look_at_the_newest_plan(self) -> None:
        if self.driver.plans:
            plan = self.driver.plans.pop()
            self.counts["copied"] += len(plan.page_copies)
            self.counts["drafted"] += any(num_logits > 1 for num_logits in plan.num_logits)
            for index, init in plan.inits.items():
                start = plan.starts[index]
                self.counts["hit"] += start > 0
                self.counts["full hit"] += start > 0 and plan.query_lens[index] == 1
                self.counts["resumed"] += bool(init.output_token_ids)

    # What holds after every one of them

    @invariant()
    def pages_add_up(self):
        pool = self.scheduler.pool
        held = (group for sequence in self.scheduler._running for group in sequence.pages)
        holders = Counter(page for pages in held for page in pages if page != NO_PAGE)
        in_tree = self._pages_in_tree()
        assert pool._counts.tolist() == [holders[page] for page in range(self.num_pages)]
        assert pool.num_used == len(holders)
        assert pool.num_cached == len(in_tree - holders.keys())
        free = set(range(self.num_pages)) - holders.keys() - in_tree
        assert sorted(pool._free[: pool.num_free].tolist()) == sorted(free)
        self.counts["shared"] += any(count > 1 for count in holders.values())

    def _pages_in_tree(self) -> set[int]:
        """Return all pages of the tree; check that each holds exactly the tokens of its key."""
        pages: set[int] = set()
        page_size = self.scheduler.pool.page_size
        top = self.scheduler.prefix_cache._root.children
        # Below the root a name begins with the namespace, of long sequences a pair.
        nodes = [(node, LONG_MARK * isinstance(name[0], tuple)) for name, node in top.items()]
        while nodes:
            node, mark = nodes.pop()
            nodes += ((child, mark) for child in node.children.values())
            tokens = [token + mark for token in memoryview(node.key).cast("i")]
            for column, of_groups in enumerate(node.pages.T.tolist()):
                known_by = tokens[column * page_size : (column + 1) * page_size]
                for page in of_groups:
                    if page != NO_PAGE:
                        assert self.driver.runner.cache[page].tolist() == known_by, "a page of other tokens"
                        assert page not in pages, "a page is in the tree twice"
                        pages.add(page)
        return pages

    @invariant()
    def counts_are_consistent(self):
        running = self.scheduler._running
        for sequence in running:
            assert sequence.num_computed_tokens <= sequence.num_scheduled_tokens
            most = MAX_DRAFTS if sequence.is_verifying else 0
            assert sequence.num_scheduled_tokens <= sequence.num_tokens + sequence.num_rows_in_flight + most
            num_columns = -(-sequence.num_scheduled_tokens // self.scheduler.pool.page_size)
            for pages, first in zip(sequence.pages, sequence.first_columns, strict=True):
                assert len(pages) >= num_columns
                assert [page == NO_PAGE for page in pages] == [column < first for column in range(len(pages))]
        slots = [sequence.slot for sequence in running]
        assert len(slots) == len(set(slots)) <= MAX_RUNNING
        ranks = [(sequence.rank, sequence.id) for sequence in running]
        assert ranks == sorted(ranks)
        waiting = [s for s in self._unfinished() if s.status is SequenceStatus.WAITING]
        assert self.scheduler.num_waiting == len(waiting)
        assert not self.is_safe or self.scheduler.num_preemptions == 0, "this policy never preempts"

    @invariant()
    def the_forecast_knows_what_is_held(self):
        assert self.scheduler.predicted_peak >= self.scheduler.pool.num_used

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.driver.run(max_steps=1_000)
        ended = Counter(sequence.id for sequence in self.driver.finished)
        assert all(ended[sequence.id] == 1 for sequence in self.sequences), "every request ends exactly once"
        for sequence in self.sequences:
            self._check_output(sequence)
            self.counts["timed out"] += (
                sequence.finish_reason is FinishReason.ERROR and not sequence.has_started
            )
        self.counts["failed"] += self.driver.num_failed_steps
        self.counts["preempted"] += self.scheduler.num_preemptions
        self.counts["evicted"] += self.scheduler.prefix_cache.num_evicted_pages
        self.scheduler.prefix_cache.evict(self.num_pages)
        assert self.scheduler.pool.num_free == self.num_pages
        assert self.scheduler.predicted_peak == 0

    def _check_output(self, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        prompt = list(sequence.request.prompt_token_ids)
        options = {"ignore_eos": sampling.ignore_eos, "seed": sequence.seed, "windows": self.kv_windows}
        whole = reference(prompt, sampling.max_tokens, **options)
        output = output_of(sequence)
        if sequence.request.readouts and (output or sequence.finish_reason is FinishReason.LENGTH):
            positions = self.driver.read.get(sequence.id, [])
            assert positions == list(range(len(prompt) - 1)), "each token once, before anything is sampled"
        if sequence.finish_reason is FinishReason.STOP and sequence.stop_reason == "s":
            assert output == whole[: self.stopped_at[sequence.id]]
        elif sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert output == whole
        else:
            assert output == whole[: len(output)]


class RunAheadMachine(SchedulerMachine):
    run_ahead = 1


class WindowMachine(RunAheadMachine):
    """All layers have a sliding window; prompts may be longer than the pool."""

    kv_windows = (5,)
    max_model_len = 40
    prompt_factor = 2
    max_token_budget = 5
    num_steps_beyond = 0
    counts: ClassVar[Counter[str]] = Counter()


class MixedMachine(WindowMachine):
    """Groups with and without a window share the pool."""

    kv_windows = (4, 0, 7)
    num_pages = 4 * NUM_PAGES
    counts: ClassVar[Counter[str]] = Counter()


class LongRopeMachine(RunAheadMachine):
    """Sequences of more than eight tokens have other keys than shorter ones."""

    short_context = 8
    counts: ClassVar[Counter[str]] = Counter()


TestRunAhead0 = SchedulerMachine.TestCase
TestRunAhead1 = RunAheadMachine.TestCase
TestWindow = WindowMachine.TestCase
TestMixed = MixedMachine.TestCase
TestLongRope = LongRopeMachine.TestCase
if not IS_LONG:
    # A fixed seed: otherwise it is a hash of the machine's source, and an edit of a comment changes the run.
    seed(1)(SchedulerMachine)
for case in (TestRunAhead0, TestRunAhead1, TestWindow, TestMixed, TestLongRope):
    # The short run hardly differs from time to time: what it has seen is counted below.
    case.settings = settings(
        max_examples=1500 if IS_LONG else 200,
        stateful_step_count=70,
        derandomize=not IS_LONG,
    )


@pytest.mark.parametrize(
    ("counts", "least"),
    [(COUNTS, 100), (WindowMachine.counts, 5), (MixedMachine.counts, 5), (LongRopeMachine.counts, 5)],
    ids=["full", "window", "mixed", "longrope"],
)
def test_every_rule_and_event_occurred_often(counts, least):
    """Check the counts of the machines above; must be the last test of this file."""
    rules = [
        name for name, value in vars(SchedulerMachine).items() if hasattr(value, "hypothesis_stateful_rule")
    ]
    names = {*rules, *EVENTS, "fork"} - {"begin"}
    if not counts:
        pytest.skip("the machines have not run")
    total = sum(counts[name] for name in rules)
    print(f"{total} operations: {dict(counts)}")
    assert total >= (100_000 if IS_LONG else 10_000) * least / 100
    assert {name: counts[name] for name in names if counts[name] <= least} == {}
