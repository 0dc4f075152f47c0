"""Which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase: every running sequence has tokens whose KV is not scheduled
yet, one for a decoding sequence, many for a new or resumed one, and a step takes as many of them as the
token budget and the pages allow. plan() may be called again before the step it planned is committed.

Aborts and stop strings only set marks; reap(), called between commit() and plan(), ends the marked
sequences. A sequence ends in one place, `_finish`, and pages are freed in `_release` only.
Freed pages are usable at once although a step in flight may still touch them: every step runs on one
stream, so a later step's writes come after an earlier step's reads.
"""

from array import array
from bisect import insort
from collections import abc
from itertools import islice
from typing import NamedTuple

from engine.errors import QueueFull
from engine.kv_layout import KVLayout
from engine.outputs import NO_TOKEN, FinishReason, Row, SlotInit, StepOutput, StepPlan
from engine.request import RepetitionStop, Request
from engine.schedule.admission import Admission
from engine.schedule.allocator import Allocator, PrefixHit
from engine.schedule.budget import StepBudget
from engine.schedule.groups import Groups
from engine.schedule.pages import PagePool
from engine.schedule.prefix import PrefixCache
from engine.schedule.queue import Deadlines, WaitingQueue
from engine.schedule.readouts import ReadoutProgress
from engine.schedule.sequence import RequestChain, Sequence, SequenceStatus

# A sequence and the tokens it has gained. A plain tuple: there are hundreds in a step.
Progress = tuple[Sequence, tuple[int, ...]]


class _Mark(NamedTuple):
    """A wish to end a sequence, carried out by reap()."""

    reason: FinishReason
    stop_reason: int | str | None
    num_output_tokens: int | None


class Scheduler:
    """Continuous batching over paged KV: who starts, who goes on, who gives way; preemption by recompute.

    Raises nothing in plan() and commit(); add() and add_group() raise what is refused. Moments are seconds
    on the caller's clock.
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
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._eos_token_ids = eos_token_ids | {NO_TOKEN}
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(priority_seconds)
        self._running: list[Sequence] = []  # by rank, so victims are taken from the end
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
        )
        self._has_states = has_states
        self._deadlines = Deadlines()
        self._marks: dict[int, _Mark] = {}
        self._next_id = 0
        self._next_step_id = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold pages and a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first step, or to resume."""
        return self._waiting.num_waiting

    @property
    def num_queried_tokens(self) -> int:
        """Prompt tokens of started sequences that were looked up for reuse."""
        return self._allocator.num_queried_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Of these, those that were found and not computed again."""
        return self._allocator.num_cached_tokens

    @property
    def predicted_peak(self) -> int:
        """Pages that the running sequences will hold at most, as far as that is known."""
        return self._admission.predicted_peak(self._next_step_id)

    # Coming and going

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
        """Queue requests with one prompt, all or none: it is computed once. Raises as add() does.

        QueueFull is not raised behind the first of a `chain`.
        """
        for request in requests:
            self._admission.check(request)
        if chain is None or chain.first is None:
            self._check_queue(requests, now)
        leader, *followers = [
            self._make_sequence(request, seed, now, chain)
            for request, seed in zip(requests, seeds, strict=True)
        ]
        self._waiting.push(leader)
        if followers:
            self._waiting.park(leader, followers)
            self._groups.add(leader)
        return [leader, *followers]

    def _check_queue(self, requests: abc.Sequence[Request], now: float) -> None:
        # What waits only for the next step does not count; its prompts are taken to be like the others.
        num_waiting, num_starting = self._waiting.num_waiting, self._allocator.num_free_slots
        share = max(0, num_waiting - num_starting) / max(1, num_waiting)
        num_waiting_tokens = int(self._waiting.num_waiting_tokens * share)
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
        raise QueueFull(message, self._waiting.retry_after_seconds(now))

    def _make_sequence(self, request: Request, seed: int, now: float, chain: RequestChain | None) -> Sequence:
        sampling = request.sampling
        num_prompt_tokens = len(request.prompt_token_ids)
        first = None if chain is None else chain.first
        sequence = Sequence(
            id=self._next_id,
            request=request,
            seed=seed,
            arrival_seconds=now if first is None else first.arrival_seconds,
            rank=self._waiting.rank(now, request.priority) if first is None else first.rank,
            token_ids=_prompt_of(request, first),
            num_prompt_tokens=num_prompt_tokens,
            max_num_tokens=num_prompt_tokens + sampling.max_tokens,
            final_token_ids=sampling.stop_token_ids
            | (frozenset((NO_TOKEN,)) if sampling.ignore_eos else self._eos_token_ids),
            repetition_stop=sampling.repetition_stop,
            chain=chain,
        )
        if chain is not None and first is None:
            chain.first = sequence
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

    def expire(self, now: float) -> list[tuple[Sequence, bool]]:
        """End the sequences that are over a time limit; returns them, with True for that on their start."""
        late = self._deadlines.pop_expired(now, self._sequences)
        for sequence, _ in late:
            self._finish(sequence, FinishReason.ERROR, None)
        return late

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The step raised: end every sequence it had a row of, or computed something for; returns them."""
        failed = []
        for sequence_id in [*plan.sequence_ids, *self._groups.dependents_of(plan.sequence_ids)]:
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
        assert not self.num_waiting, f"{self.num_waiting} waiting sequences left"
        assert self.pool.num_used == 0, f"{self.pool.num_used} pages leaked"

    # Planning a step

    def plan(self, now: float) -> StepPlan | None:
        """Choose the rows of the next step; None if there is nothing to compute until a commit or an add.

        Decoding sequences come first, then the rest of the budget goes to prefill, in order.
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
                rows.append(self._plan_history(sequence, num_ready))
                room -= len(rows[-1].token_ids)
        while room > 0 and (found := self._find_next()) is not None:
            sequence = self._waiting.pop(now)
            plan.page_copies.extend(self._allocator.allocate(sequence, found, self._next_step_id))
            if not rows:  # its cached tokens are context, too
                room = min(room, self._budget.prefill_tokens(plan.num_rows, found.num_tokens))
            rows.append(self._start(sequence, room, now))
            room -= len(rows[-1].token_ids)
        plan.extend(rows)
        if not plan.slots:
            if len(unfinished_prefills) > 1 and not any(s.num_rows_in_flight for s in self._running):
                # Prompts longer than a sliding window hold each other up: the last one gives its pages back.
                self._preempt(self._running[-1])
                return self.plan(now)
            return None
        self._next_step_id += 1
        return plan

    def _plan_decode(self) -> tuple[StepPlan, list[Sequence]]:
        """Return a plan with a row for every decoding sequence, and the running sequences with other work.

        These have tokens the host knows that are not all scheduled, or drafts. Written flat: with hundreds of
        sequences these loops are most of what planning costs.
        """
        page_size = self.pool.page_size
        while True:
            rows: list[Sequence] = []
            growing: list[int] = []
            unfinished_prefills: list[Sequence] = []
            for sequence in self._running:
                start = sequence.num_scheduled_tokens
                has_drafts = sequence.draft_token_ids and self._prepare_drafts(sequence)
                if start < sequence.num_history_tokens or has_drafts:
                    unfinished_prefills.append(sequence)
                # A length limit is known, and never exceeded.
                elif start + 1 < sequence.max_num_tokens and not sequence.is_verifying:
                    if start == len(sequence.pages[0]) * page_size:
                        growing.append(len(rows))
                    rows.append(sequence)
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
        plan = StepPlan(self._next_step_id, ids, slots, starts, ones, ones.copy(), {}, new_pages, {}, {}, [])
        return plan, unfinished_prefills

    def _find_next(self) -> PrefixHit | None:
        """What is known of the tokens of whose turn it is, if that one may start."""
        sequence, step = self._waiting.head(), self._next_step_id
        # A preempted sequence resumes only when its last row has landed: its newest token must be known.
        if sequence is None or not self._allocator.num_free_slots or sequence.num_rows_in_flight:
            return None
        if self._admission.is_refused(sequence, step):
            return None
        found = self._allocator.find(sequence, step)
        return found if self._admission.may_start(sequence, step, found.pages, found.num_tokens) else None

    def _start(self, sequence: Sequence, room: int, now: float) -> Row:
        """Let a sequence that has its slot and its pages run, and plan its first chunk."""
        sequence.status = SequenceStatus.RUNNING
        if not sequence.has_started:
            sequence.first_scheduled_seconds = now
        insort(self._running, sequence, key=lambda other: (other.rank, other.id))
        init = SlotInit(
            sampling=sequence.request.sampling,
            seed=sequence.seed,
            prompt_token_ids=sequence.request.prompt_token_ids,
            output_token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
            constraints=sequence.request.constraints,
        )
        return self._plan_history(sequence, room, init)

    def _plan_history(self, sequence: Sequence, room: int, init: SlotInit | None = None) -> Row:
        """Plan the next tokens of a sequence's history; after the last one come its drafts, if it has any."""
        start = sequence.num_scheduled_tokens
        end = min(start + room, sequence.num_history_tokens)
        is_last = end == sequence.num_history_tokens
        token_ids = tuple(sequence.token_ids[start:end])
        new_pages = self._allocator.unsent_pages(sequence)
        num_logits = int(is_last and end < sequence.max_num_tokens)
        if sequence.draft_token_ids and num_logits:
            drafts = sequence.draft_token_ids[: room - (end - start)]
            sequence.draft_token_ids = ()
            token_ids += drafts
            num_logits += len(drafts)
        sequence.num_scheduled_tokens = start + len(token_ids)
        sequence.num_rows_in_flight += 1
        # How many drafts are accepted is known only when the row is done: until then nothing can follow it.
        sequence.is_verifying = num_logits > 1
        if is_last:
            self._admission.on_prefill_done(sequence, self._next_step_id)
            self._groups.on_history_scheduled(sequence, self._next_step_id)
        readouts = self._readouts.row_readouts(sequence, start, end)
        return Row(sequence.id, sequence.slot, start, token_ids, num_logits, new_pages, init, readouts)

    def _prepare_drafts(self, sequence: Sequence) -> bool:
        """Make room for a sequence's drafts and the token after them; without free pages drop them.

        Only where the choice of a token does not depend on the tokens before it beside the logits can several
        be sampled at once.
        """
        sampling, num_tokens = sequence.request.sampling, sequence.num_tokens
        drafts = sequence.draft_token_ids[: sequence.max_num_tokens - 1 - num_tokens]
        has_free_choice = not (sequence.request.constraints or sampling.has_penalties or sampling.min_tokens)
        may_verify = bool(drafts) and has_free_choice and not self._has_states
        # The last token of an output is sampled and never computed.
        num_paged = min(num_tokens + len(drafts) + 1, sequence.max_num_tokens - 1)
        num_new = self._allocator.reserve(sequence, num_paged) if may_verify else None
        if num_new is None:
            sequence.draft_token_ids = ()
            return False
        sequence.draft_token_ids = drafts
        sequence.num_history_tokens = num_tokens
        if num_new:
            self._admission.on_prefill_done(sequence, self._next_step_id)
        return True

    # Taking in what a step computed

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Progress]:
        """Take in what a step computed. Rows of sequences that ended meanwhile are dropped."""
        if not output.num_constrained:  # else the device may have waited for masks
            seconds = output.end_seconds - output.start_seconds
            history = [(plan.starts[index], plan.query_lens[index]) for index in plan.token_ids]
            num_keys = sum(query_len * (start + query_len / 2) for start, query_len in history)
            num_prefill_tokens = sum(query_len for _, query_len in history)
            self._budget.observe(plan.num_decode_rows, num_prefill_tokens, num_keys, seconds)
        progress: list[Progress] = []
        for sequence, sampled in self._apply_output(plan, output):
            token_ids = sequence.token_ids
            for index, token_id in enumerate(sampled, 1):
                token_ids.append(token_id)
                if (
                    token_id in sequence.final_token_ids
                    or len(token_ids) >= sequence.max_num_tokens
                    or sequence.repetition_stop is not None
                ):
                    self._check_end(sequence, token_id)
                    if sequence.is_finished:
                        sampled = sampled[:index]
                        break
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

    def _apply_output(self, plan: StepPlan, output: StepOutput) -> abc.Iterator[Progress]:
        """Count what was computed of each sequence that still exists; yield those whose rows were sampled."""
        sequences = self._sequences
        decode = zip(plan.sequence_ids, plan.starts, output.tokens, strict=True)
        for sequence_id, start, sampled in islice(decode, plan.num_decode_rows):
            sequence = sequences.get(sequence_id)
            if sequence is not None:
                sequence.num_rows_in_flight -= 1
                if sequence.slot >= 0:  # else it was preempted meanwhile: the token counts, its KV is lost
                    sequence.num_computed_tokens = start + 1
                yield sequence, sampled
        for index in plan.token_ids:
            sequence = sequences.get(plan.sequence_ids[index])
            if sequence is None:
                continue
            sequence.num_rows_in_flight -= 1
            self._groups.on_row_done(sequence)
            sampled, num_logits = output.tokens[index], plan.num_logits[index]
            end = plan.starts[index] + plan.query_lens[index]
            if sequence.is_verifying:
                sequence.is_verifying = False
                end -= num_logits - max(1, len(sampled))  # the rest were rejected drafts
                if sequence.slot >= 0:
                    sequence.num_scheduled_tokens = end
                    # Its slot's last sampled token may follow a rejected draft: the next row names its own.
                    sequence.num_history_tokens = end + 1
            if sequence.slot >= 0:
                sequence.num_computed_tokens = end
                self._allocator.cache_pages(sequence)
            self._readouts.on_row_done(sequence, plan.readouts.get(index, ()))
            if num_logits or end == sequence.max_num_tokens:
                yield sequence, sampled

    def _check_end(self, sequence: Sequence, token_id: int) -> None:
        """End `sequence` if its newest token says so."""
        sampling = sequence.request.sampling
        if token_id == NO_TOKEN:
            sequence.token_ids.pop()
            self._finish(sequence, FinishReason.ERROR, None)
        elif token_id in sequence.final_token_ids and sequence.num_output_tokens > sampling.min_tokens:
            stop_reason = token_id if token_id in sampling.stop_token_ids else None
            self._finish(sequence, FinishReason.STOP, stop_reason)
        elif sequence.is_repeating:
            self._finish(sequence, FinishReason.STOP, RepetitionStop.REASON)
        elif sequence.num_tokens >= sequence.max_num_tokens:
            self._finish(sequence, FinishReason.LENGTH, None)

    def _preempt(self, sequence: Sequence) -> None:
        """Take pages and slot away; the sequence waits in front and computes what is lost when it resumes."""
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self._waiting.push(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a running sequence."""
        self._running.remove(sequence)
        sequence.draft_token_ids = ()
        self._allocator.release(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        """The one end of every sequence."""
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


def _prompt_of(request: Request, first: Sequence | None) -> "array[int]":
    """The tokens of a prompt; those it has in common with that of the `first` of its chain are copied."""
    if first is None:
        return array("i", request.prompt_token_ids)
    num_common = first.num_prompt_tokens
    return first.token_ids[:num_common] + array("i", request.prompt_token_ids[num_common:])
