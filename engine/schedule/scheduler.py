"""Which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase: every running sequence has tokens whose KV is not scheduled
yet, one for a decoding sequence, many for a new or resumed one, and a step takes as many of them as the
token budget and the pages allow. plan() may be called again before the step it planned is committed.

Aborts and stop strings only set marks; reap(), called between commit() and plan(), ends the marked
sequences. A sequence ends in one place, `_finish`, and its pages are freed there and in `_preempt` only.
Freed pages are usable at once although a step in flight may still touch them: every step runs on one
stream, so a later step's writes come after an earlier step's reads.
"""

from bisect import insort
from collections import deque
from typing import NamedTuple

from engine.outputs import NO_PAGE, NO_TOKEN, DecodeRows, FinishReason, Row, SlotInit, StepOutput, StepPlan
from engine.request import Request
from engine.schedule.admission import Admission
from engine.schedule.pages import PagePool
from engine.schedule.sequence import Sequence, SequenceStatus


class Progress(NamedTuple):
    """What commit() did to one sequence: the tokens it gained, and whether that was its end."""

    sequence: Sequence
    new_token_ids: tuple[int, ...]


class _Mark(NamedTuple):
    """A wish to end a sequence, carried out by reap()."""

    reason: FinishReason
    stop_reason: int | str | None
    num_output_tokens: int | None


class Scheduler:
    """First come, first served continuous batching over paged KV, preemption by recompute.

    Raises nothing in plan() and commit(); add() raises what admission refuses.
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
    ) -> None:
        self.pool = PagePool(num_pages, page_size)
        # Every running sequence must fit into one step, or the last ones would starve.
        max_running = min(max_num_seqs, token_budget)
        self._admission = Admission(
            self.pool, max_running=max_running, max_waiting=max_waiting, max_model_len=max_model_len
        )
        self._token_budget = token_budget
        self._eos_token_ids = eos_token_ids
        self._no_token = frozenset([NO_TOKEN])
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # by arrival, so victims are taken from the end
        self._marks: dict[int, _Mark] = {}
        self._next_id = 0
        self._next_step_id = 0
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold pages and a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first step, or to resume."""
        return len(self._waiting)

    def add(self, request: Request, *, seed: int, now: float) -> Sequence:
        """Queue a request. Raises InvalidRequest, ContextLengthExceeded or QueueFull."""
        self._admission.check(request, num_waiting=len(self._waiting), num_running=len(self._running))
        sampling = request.sampling
        num_prompt_tokens = len(request.prompt_token_ids)
        sequence = Sequence(
            id=self._next_id,
            request=request,
            seed=seed,
            arrival_seconds=now,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            max_num_tokens=num_prompt_tokens + sampling.max_tokens,
            final_token_ids=sampling.stop_token_ids.union(
                self._no_token, () if sampling.ignore_eos else self._eos_token_ids
            ),
        )
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        self._waiting.append(sequence)
        return sequence

    def mark(
        self,
        sequence_id: int,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """Ask for the end of a sequence; the next reap() carries it out. Unknown or ended ids are ignored.

        `num_output_tokens` is how many of its output tokens count (a stop string names the one it ended at).
        """
        if sequence_id in self._sequences:
            self._marks.setdefault(sequence_id, _Mark(reason, stop_reason, num_output_tokens))

    def reap(self) -> list[Sequence]:
        """End the marked sequences; returns them."""
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

    def plan(self, now: float) -> StepPlan | None:
        """Choose the rows of the next step; None if there is nothing to compute until a commit or an add.

        Decoding sequences come first, then the rest of the budget goes to prefill in order of arrival.
        """
        decode, unfinished_prefills = self._plan_decode()
        budget = self._token_budget - len(decode.slots)
        chunks: list[Row] = []
        for sequence in unfinished_prefills:
            if budget == 0:
                break
            if sequence.status is SequenceStatus.RUNNING:  # not preempted by a decoding one just now
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        while budget > 0 and self._waiting and self._may_start(self._waiting[0]):
            chunks.append(self._start(self._waiting.popleft(), budget, now))
            budget -= chunks[-1].num_tokens
        if not decode.slots and not chunks:
            return None
        chunks.sort(key=lambda row: row.num_tokens > 1)
        plan = StepPlan(self._next_step_id, decode, tuple(chunks), self._token_budget - budget)
        self._next_step_id += 1
        return plan

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Progress]:
        """Take in what a step computed. Rows of sequences that ended meanwhile are dropped."""
        progress: list[Progress] = []
        tokens = iter(output.tokens)
        for sequence_id, sampled in zip(plan.decode.sequence_ids, tokens, strict=False):
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                progress.append(self._land(sequence, 1, sampled))
        for row, sampled in zip(plan.chunks, tokens, strict=True):
            sequence = self._sequences.get(row.sequence_id)
            if sequence is not None:
                gain = self._land(sequence, row.num_tokens, sampled)
                if sampled:
                    progress.append(gain)
        return progress

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The step raised: end every sequence it had a row of; returns them."""
        failed = []
        for sequence_id in plan.sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                self._finish(sequence, FinishReason.ERROR, None)
                failed.append(sequence)
        return failed

    def end_all(self, reason: FinishReason) -> list[Sequence]:
        """End every sequence; returns them."""
        ended = list(self._sequences.values())
        for sequence in ended:
            self._finish(sequence, reason, None)
        return ended

    def check_idle(self) -> None:
        """Raise AssertionError if anything is held although nothing is queued or running."""
        assert not self._sequences, f"{len(self._sequences)} sequences left"
        assert not self._running, f"{len(self._running)} running sequences left"
        assert not self._waiting, f"{len(self._waiting)} waiting sequences left"
        assert self.pool.num_used == 0, f"{self.pool.num_used} pages leaked"

    def _plan_decode(self) -> tuple[DecodeRows, list[Sequence]]:
        """A row for every decoding sequence; and the running sequences whose history is not all scheduled.

        Written flat: with hundreds of sequences this loop is most of what planning costs.
        """
        rows = DecodeRows.empty()
        unfinished_prefills: list[Sequence] = []
        page_size = self.pool.page_size
        for sequence in tuple(self._running):
            start = sequence.num_scheduled_tokens
            if start < sequence.num_history_tokens:
                unfinished_prefills.append(sequence)
                continue
            if start + 1 >= sequence.max_num_tokens:
                continue  # the tokens in flight reach the length limit, which is never over-run
            page = self._grow(sequence) if start == len(sequence.pages) * page_size else NO_PAGE
            if page is None or sequence.slot < 0:
                continue  # preempted just now, for a page of its own or of an earlier one
            sequence.num_scheduled_tokens = start + 1
            sequence.num_rows_in_flight += 1
            rows.sequence_ids.append(sequence.id)
            rows.slots.append(sequence.slot)
            rows.starts.append(start)
            rows.new_pages.append(page)
        return rows, unfinished_prefills

    def _grow(self, sequence: Sequence) -> int | None:
        """One more page for `sequence`; preempts the latest arrivals for it.

        None when `sequence` itself was the latest and had to go.
        """
        while (pages := self.pool.allocate(1)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None
        sequence.pages += pages
        return pages[0]

    def _may_start(self, sequence: Sequence) -> bool:
        # A preempted sequence resumes only when its last row has landed: its newest token must be known.
        return sequence.num_rows_in_flight == 0 and self._admission.may_start(sequence, len(self._running))

    def _start(self, sequence: Sequence, budget: int, now: float) -> Row:
        """Give a waiting sequence its pages and a slot, and plan its first chunk."""
        pages = self.pool.allocate(self.pool.pages_for(sequence.num_tokens))
        assert pages is not None, "admission promised pages"
        sequence.pages = pages
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        sequence.num_history_tokens = sequence.num_tokens
        if sequence.first_scheduled_seconds is None:
            sequence.first_scheduled_seconds = now
        insort(self._running, sequence, key=lambda other: other.id)
        init = SlotInit(
            sampling=sequence.request.sampling,
            seed=sequence.seed,
            prompt_token_ids=sequence.request.prompt_token_ids,
            output_token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
        )
        return self._chunk(sequence, budget, tuple(pages), init)

    def _chunk(
        self, sequence: Sequence, budget: int, new_pages: tuple[int, ...] = (), init: SlotInit | None = None
    ) -> Row:
        """Plan the next tokens of a sequence's history; the logits of the last one are sampled."""
        start = sequence.num_scheduled_tokens
        end = min(start + budget, sequence.num_history_tokens)
        sequence.num_scheduled_tokens = end
        sequence.num_rows_in_flight += 1
        return Row(
            sequence_id=sequence.id,
            slot=sequence.slot,
            start=start,
            token_ids=tuple(sequence.token_ids[start:end]),
            sample=end == sequence.num_history_tokens,
            new_pages=new_pages,
            init=init,
        )

    def _land(self, sequence: Sequence, num_tokens: int, sampled: tuple[int, ...]) -> Progress:
        """A row of `num_tokens` tokens was computed and `sampled` chosen: returns those that count."""
        sequence.num_rows_in_flight -= 1
        if sequence.slot >= 0:  # else it was preempted meanwhile: the token counts, its KV is gone
            sequence.num_computed_tokens += num_tokens
        for index, token_id in enumerate(sampled, 1):
            sequence.token_ids.append(token_id)
            if token_id in sequence.final_token_ids or len(sequence.token_ids) >= sequence.max_num_tokens:
                self._end_at(sequence, token_id)
                if sequence.is_finished:
                    return Progress(sequence, sampled[:index])
        return Progress(sequence, sampled)

    def _end_at(self, sequence: Sequence, token_id: int) -> None:
        """End `sequence` if its newest token says so."""
        sampling = sequence.request.sampling
        if token_id == NO_TOKEN:
            sequence.token_ids.pop()
            self._finish(sequence, FinishReason.ERROR, None)
        elif token_id in sequence.final_token_ids and sequence.num_output_tokens > sampling.min_tokens:
            stop_reason = token_id if token_id in sampling.stop_token_ids else None
            self._finish(sequence, FinishReason.STOP, stop_reason)
        elif sequence.num_tokens >= sequence.max_num_tokens:
            self._finish(sequence, FinishReason.LENGTH, None)

    def _preempt(self, sequence: Sequence) -> None:
        """Take pages and slot away; the sequence waits in front and recomputes its tokens when it resumes."""
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_scheduled_tokens = 0
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        """The one end of every sequence."""
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        del self._sequences[sequence.id]

    def _release(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.pool.free(sequence.pages)
        sequence.pages = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
