"""Chooses which tokens of which sequences the next step computes, and ends sequences.

There is no prefill phase and no decode phase: every running sequence has tokens whose KV is not scheduled
yet, one for a decoding sequence, many for a new or resumed one, and a step takes as many of them as the
token budget and the pages allow. plan() may be called again before the step it planned is committed.

Aborts and stop strings only set marks; reap(), called between commit() and plan(), ends the marked
sequences. All sequences end in one function, `_finish`, and their pages are freed in `_release` only.
Freed pages are usable at once although a step in flight may still touch them: every step runs on one
stream, so a later step's writes come after an earlier step's reads.
"""

from bisect import insort
from collections import abc
from itertools import islice
from typing import NamedTuple

from engine.kv_layout import KVLayout
from engine.outputs import NO_TOKEN, FinishReason, Row, StepOutput, StepPlan
from engine.request import Request
from engine.schedule.admission import Admission
from engine.schedule.allocator import Allocator, PrefixHit
from engine.schedule.budget import StepBudget
from engine.schedule.groups import Groups
from engine.schedule.pages import PagePool
from engine.schedule.prefix import PrefixCache
from engine.schedule.queue import Deadlines, WaitingQueue
from engine.schedule.readouts import ReadoutProgress
from engine.schedule.rows import Progress, Rows
from engine.schedule.sequence import RequestChain, Sequence, SequenceStatus


class _Mark(NamedTuple):
    """How reap() ends a sequence. `num_output_tokens`: keep this many tokens; None: keep all."""

    reason: FinishReason
    stop_reason: int | str | None
    num_output_tokens: int | None


class Scheduler:
    """Continuous batching over paged KV: admits, plans, preempts (by recompute) and ends sequences.

    plan() and commit() raise nothing; add() and add_group() raise if they refuse a request. `now` is in
    seconds, on any clock of the caller's.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        max_waiting: int,
        eos_token_ids: frozenset[int],
        run_ahead: int = 0,
        kv_windows: tuple[int, ...] = (0,),
        has_states: bool = False,
        short_context: int | None = None,
        max_waiting_tokens: int | None = None,
        priority_seconds: float = 0.0,
        overcommit: float = 0.5,
        target_step_seconds: float | None = None,
        with_prefix_cache: bool = True,
    ) -> None:
        layout = KVLayout(kv_windows, page_size, token_budget=token_budget, run_ahead=run_ahead)
        self.pool = PagePool(num_pages, page_size)
        self.prefix_cache = PrefixCache(self.pool, layout)
        self.num_preemptions = 0
        # Every running sequence must fit into one step, or the last ones would starve.
        max_running = min(max_num_seqs, token_budget)
        self._layout = layout
        self._admission = Admission(
            self.pool,
            layout,
            max_running=max_running,
            max_model_len=max_model_len,
            token_budget=token_budget,
            overcommit=overcommit,
            run_ahead=run_ahead,
        )
        self._budget = StepBudget(token_budget, target_step_seconds)
        self._eos_token_ids = eos_token_ids
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(priority_seconds, max_waiting, max_waiting_tokens)
        self._running: list[Sequence] = []  # by rank: the last one is preempted first
        self._short_context = short_context
        self._groups = Groups()
        self._readouts = ReadoutProgress()
        self._allocator = Allocator(
            self.pool,
            layout,
            self.prefix_cache,
            self._admission,
            self._groups,
            self._readouts,
            num_slots=max_running,
            with_prefix_cache=with_prefix_cache,
            has_states=has_states,
            short_context=short_context,
        )
        self._rows = Rows(
            self._allocator,
            self._admission,
            self._groups,
            self._readouts,
            has_states=has_states,
            short_context=short_context,
        )
        self._deadlines = Deadlines()
        self._marks: dict[int, _Mark] = {}
        self._next_id = 0
        self._next_step_id = 0

    @property
    def num_running(self) -> int:
        """The number of sequences that hold pages and a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of sequences that wait for their first step, or to resume."""
        return self._waiting.num_waiting

    @property
    def num_queried_tokens(self) -> int:
        """The number of prompt tokens looked up in the prefix cache, over all started sequences."""
        return self._allocator.num_queried_tokens

    @property
    def num_cached_tokens(self) -> int:
        """The number of prompt tokens found in the prefix cache and not computed again."""
        return self._allocator.num_cached_tokens

    @property
    def num_drafts(self) -> int:
        """The number of draft tokens that were verified."""
        return self._rows.num_drafts

    @property
    def num_accepted_drafts(self) -> int:
        """The number of draft tokens that were accepted."""
        return self._rows.num_accepted_drafts

    def first_sequences(self, count: int) -> list[Sequence]:
        """Return up to `count` sequences: running ones by rank, then waiting ones in order of arrival."""
        running = self._running[:count]
        waiting = (s for s in self._sequences.values() if s.status is SequenceStatus.WAITING)
        return [*running, *islice(waiting, count - len(running))]

    @property
    def predicted_peak(self) -> int:
        """The most pages that the running sequences are expected to hold at any later step."""
        return self._admission.predicted_peak(self._next_step_id)

    # Adding and ending sequences

    def add(self, request: Request, *, seed: int, now: float) -> Sequence:
        """Queue a request. Raises InvalidRequest, ContextLengthExceeded or QueueFull."""
        return self.add_group([request], seeds=[seed], now=now)[0]

    def add_group(
        self,
        requests: abc.Sequence[Request],
        *,
        seeds: abc.Sequence[int],
        now: float,
        chain: RequestChain | None = None,
    ) -> list[Sequence]:
        """Queue requests with one prompt, all or none; the prompt is computed once. Raises as add() does.

        After the first request of a `chain` QueueFull is not raised for the others.
        """
        for request in requests:
            self._admission.check(request)
        if chain is None or chain.first is None:
            num_starting = self._allocator.num_free_slots
            self._waiting.check_room(requests, num_starting=num_starting, now=now)
        leader, *followers = [
            self._add(request, seed, now, chain) for request, seed in zip(requests, seeds, strict=True)
        ]
        self._waiting.push(leader)
        if followers:
            self._waiting.park(leader, followers)
            self._groups.add(leader)
        return [leader, *followers]

    def _add(self, request: Request, seed: int, now: float, chain: RequestChain | None) -> Sequence:
        sequence = Sequence.of(
            self._next_id,
            request,
            seed=seed,
            now=now,
            rank=self._waiting.rank(now, request.priority),
            eos_token_ids=self._eos_token_ids,
            chain=chain,
        )
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        self._deadlines.add(sequence)
        return sequence

    def mark(
        self,
        sequence_id: int,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """Let the next reap() end a sequence. Unknown ids and those of ended sequences are ignored.

        Only its first `num_output_tokens` output tokens are kept, if given: those up to a stop string.
        """
        if sequence_id in self._sequences:
            self._marks.setdefault(sequence_id, _Mark(reason, stop_reason, num_output_tokens))

    def reap(self) -> list[Sequence]:
        """End the marked sequences and return them."""
        ended = []
        for sequence_id, mark in self._marks.items():
            sequence = self._sequences.get(sequence_id)
            if sequence is None:
                continue
            if mark.num_output_tokens is not None:
                del sequence.token_ids[sequence.num_prompt_tokens + mark.num_output_tokens :]
            self._finish(sequence, mark.reason, mark.stop_reason)
            ended.append(sequence)
        self._marks.clear()
        return ended

    def expire(self, now: float) -> list[tuple[Sequence, bool]]:
        """End the sequences that are past a time limit; return them, with True if it limits their waiting."""
        late = self._deadlines.pop_expired(now, self._sequences)
        for sequence, _ in late:
            self._finish(sequence, FinishReason.ERROR, None)
        return late

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """End the sequences with a row in a step that raised, and their dependents; return them."""
        failed = []
        for sequence_id in [*plan.sequence_ids, *self._groups.dependents_of(plan.sequence_ids)]:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                self._finish(sequence, FinishReason.ERROR, None)
                failed.append(sequence)
        return failed

    def end_all(self, reason: FinishReason) -> list[Sequence]:
        """End every sequence and return them."""
        ended = list(self._sequences.values())
        for sequence in ended:
            self._finish(sequence, reason, None)
        return ended

    def check_idle(self) -> None:
        """Raise AssertionError if a sequence is left or a page is held."""
        assert not self._sequences, f"{len(self._sequences)} sequences left"
        assert not self._running, f"{len(self._running)} running sequences left"
        assert not self.num_waiting, f"{self.num_waiting} waiting sequences left"
        assert self.pool.num_used == 0, f"{self.pool.num_used} pages leaked"

    # Planning a step

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step; return None if there is nothing to compute before a commit or an add.

        Decoding sequences come first. The rest of the token budget goes to prefill, by rank.
        """
        for leader in self._groups.pop_ready_leaders():
            self._groups.add_followers(leader, self._waiting.release(leader))
        plan, unfinished_prefills = self._plan_decode()
        context = unfinished_prefills[0].num_scheduled_tokens if unfinished_prefills else 0
        room = self._budget.prefill_tokens(plan.num_rows, context)
        rows: list[Row] = []
        for sequence in unfinished_prefills:
            if room == 0:
                break
            if num_ready := self._allocator.extend(sequence, room):
                rows.append(self._rows.plan(sequence, num_ready, self._next_step_id))
                room -= len(rows[-1].token_ids)
        while room > 0 and (found := self._find_next()) is not None:
            sequence = self._waiting.pop(now)
            plan.page_copies.extend(self._allocator.allocate(sequence, found, self._next_step_id))
            if not rows:  # the tokens it found are context, too
                room = min(room, self._budget.prefill_tokens(plan.num_rows, found.num_tokens))
            rows.append(self._start(sequence, room, now))
            room -= len(rows[-1].token_ids)
        plan.extend(rows)
        if not plan.slots:
            if len(unfinished_prefills) > 1 and not any(s.num_rows_in_flight for s in self._running):
                # Prompts longer than a sliding window block each other: the last one gives its pages back.
                self._preempt(self._running[-1])
                return self.plan(now)
            return None
        self._next_step_id += 1
        return plan

    def _plan_decode(self) -> tuple[StepPlan, list[Sequence]]:
        """Return a plan with a row for every decoding sequence, and the running sequences with other work.

        The latter have unscheduled tokens that the host knows, or drafts. The loops are written flat: with
        hundreds of sequences they take most of the time of plan().
        """
        page_size, step, short_context = self.pool.page_size, self._next_step_id, self._short_context
        while True:
            outgrown: list[Sequence] = []
            rows: list[Sequence] = []
            growing: list[int] = []
            unfinished_prefills: list[Sequence] = []
            for sequence in self._running:
                start = sequence.num_scheduled_tokens
                if start == short_context and self._outgrows(sequence):
                    outgrown.append(sequence)
                    continue
                has_drafts = sequence.draft_token_ids and self._rows.prepare_drafts(sequence, step)
                if start < sequence.num_history_tokens or has_drafts:
                    unfinished_prefills.append(sequence)
                # The length limit is known in advance, so no row is planned past it.
                elif start + 1 < sequence.max_num_tokens and not sequence.is_verifying:
                    if start == len(sequence.pages[0]) * page_size:
                        growing.append(len(rows))
                    rows.append(sequence)
            for sequence in outgrown:
                self._requeue(sequence)
            pages = self._allocator.grow([rows[index] for index in growing])
            if pages is not None:
                break
            self._preempt(self._running[-1])
        new_pages = dict(zip(growing, pages, strict=True))
        starts = []
        for sequence in rows:
            starts.append(sequence.num_scheduled_tokens)
            sequence.num_scheduled_tokens += 1
            sequence.num_rows_in_flight += 1
        ids, slots = [sequence.id for sequence in rows], [sequence.slot for sequence in rows]
        ones = [1] * len(rows)
        plan = StepPlan(step, ids, slots, starts, ones, ones.copy(), {}, new_pages, {}, {}, [])
        return plan, unfinished_prefills

    def _outgrows(self, sequence: Sequence) -> bool:
        """Return True if the next row of a sequence at the end of the short context makes it a long one.

        All of its keys are computed again then, with the other angles of LongRoPE.
        """
        has_next = sequence.num_scheduled_tokens + 1 < sequence.max_num_tokens and not sequence.is_verifying
        return has_next and not sequence.is_long

    def _find_next(self) -> PrefixHit | None:
        """Return the prefix hit of the next waiting sequence, or None if it may not start yet."""
        sequence, step = self._waiting.head(), self._next_step_id
        # A preempted sequence resumes only when its last row is committed: its newest token must be known.
        if sequence is None or not self._allocator.num_free_slots or sequence.num_rows_in_flight:
            return None
        if self._admission.is_refused(sequence, step):
            return None
        found = self._allocator.find(sequence, step)
        return found if self._admission.may_start(sequence, step, found.pages, found.num_tokens) else None

    def _start(self, sequence: Sequence, room: int, now: float) -> Row:
        """Make a sequence that has a slot and pages a running one; return its first row."""
        sequence.status = SequenceStatus.RUNNING
        if not sequence.has_started:
            sequence.first_scheduled_seconds = now
        insort(self._running, sequence, key=lambda other: (other.rank, other.id))
        return self._rows.plan_first(sequence, room, self._next_step_id)

    # Committing a step, preempting and ending sequences

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Progress]:
        """Apply the output of a step: append tokens, end sequences, free pages that left a window.

        Returns the sequences whose rows were sampled, with the tokens they gained. Rows of sequences that
        ended meanwhile are dropped.
        """
        if not output.num_constrained:  # else the device may have waited for masks
            seconds = output.end_seconds - output.start_seconds
            history = [(plan.starts[index], plan.query_lens[index]) for index in plan.token_ids]
            num_keys = sum(query_len * (start + query_len / 2) for start, query_len in history)
            num_prefill_tokens = sum(query_len for _, query_len in history)
            self._budget.observe(plan.num_decode_rows, num_prefill_tokens, num_keys, seconds)
        progress: list[Progress] = []
        for sequence, sampled in self._rows.apply(self._sequences, plan, output):
            if (
                sequence.num_tokens + len(sampled) < sequence.max_num_tokens
                and sequence.final_token_ids.isdisjoint(sampled)
                and sequence.repetition_stop is None
            ):
                sequence.token_ids.extend(sampled)
            else:
                sampled = self._append(sequence, sampled)
            if not sampled:  # its constraints allow no token, or only its prompt was to be computed
                is_all = sequence.num_tokens >= sequence.max_num_tokens
                self._finish(sequence, FinishReason.LENGTH if is_all else FinishReason.STOP, None)
            progress.append((sequence, sampled))
        if self._layout.window_groups:
            for sequence_id in plan.sequence_ids:
                running = self._sequences.get(sequence_id)
                if running is not None and running.slot >= 0:
                    self._allocator.free_left_pages(running)
        return progress

    def _append(self, sequence: Sequence, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Append tokens one by one until one ends the sequence; return them.

        NO_TOKEN ends it, too, and is not kept.
        """
        for index, token_id in enumerate(sampled, 1):
            sequence.token_ids.append(token_id)
            reasons = sequence.end_reasons()
            if reasons is not None:
                if token_id == NO_TOKEN:
                    sequence.token_ids.pop()
                self._finish(sequence, *reasons)
                return sampled[:index]
        return sampled

    def _preempt(self, sequence: Sequence) -> None:
        """Take slot and pages from a sequence for the sake of others."""
        self._requeue(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        """Take slot and pages from a sequence and requeue it by its rank; it recomputes its KV on resume."""
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.push(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a running sequence."""
        self._running.remove(sequence)
        sequence.draft_token_ids = ()
        self._allocator.release(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End a sequence: free what it holds and remove it everywhere. No sequence ends in another way."""
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence)
        else:
            self._waiting.discard(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        del self._sequences[sequence.id]
        self._waiting.release(sequence)
        self._groups.forget(sequence)
        self._readouts.forget(sequence)
        if sequence.has_started and sequence.request.sampling.max_tokens and sequence.chain is None:
            self._admission.on_ended(sequence.num_output_tokens, is_complete=reason is FinishReason.STOP)
