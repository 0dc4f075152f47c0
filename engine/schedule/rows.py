"""Rows of known tokens: plans them, and applies to the sequences what the rows of a step computed.

The counts of a sequence change here, and for decode rows, which are planned in one loop, in the scheduler.
"""

from collections.abc import Iterator, Mapping
from itertools import islice

from engine.outputs import Row, SlotInit, StepOutput, StepPlan
from engine.schedule.admission import Admission
from engine.schedule.allocator import Allocator
from engine.schedule.groups import Groups
from engine.schedule.readouts import ReadoutProgress
from engine.schedule.sequence import Sequence

# A sequence and its new tokens. A plain tuple: there are hundreds in a step.
Progress = tuple[Sequence, tuple[int, ...]]


class Rows:
    """Plans the rows that compute tokens the host knows, and applies the output of all rows of a step."""

    def __init__(
        self,
        allocator: Allocator,
        admission: Admission,
        groups: Groups,
        readouts: ReadoutProgress,
        *,
        has_states: bool,
        short_context: int | None,
    ) -> None:
        self._allocator = allocator
        self._admission = admission
        self._groups = groups
        self._readouts = readouts
        self._has_states = has_states
        self._short_context = short_context
        self.num_drafts = 0  # of those that were verified
        self.num_accepted_drafts = 0

    def plan_first(self, sequence: Sequence, room: int, step: int) -> Row:
        """Plan the first row of a sequence that has just got its slot and its pages."""
        init = SlotInit(
            sampling=sequence.request.sampling,
            seed=sequence.seed,
            prompt_token_ids=sequence.request.prompt_token_ids,
            output_token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
            constraints=sequence.request.constraints,
        )
        return self.plan(sequence, room, step, init)

    def plan(self, sequence: Sequence, room: int, step: int, init: SlotInit | None = None) -> Row:
        """Plan a row of up to `room` tokens of a sequence's history; its drafts follow the last of them."""
        start = sequence.num_scheduled_tokens
        end = min(start + room, sequence.num_history_tokens)
        is_last = end == sequence.num_history_tokens
        token_ids = tuple(sequence.token_ids[start:end])
        new_pages = self._allocator.unsent_pages(sequence)
        num_logits = int(is_last and end < sequence.max_num_tokens)
        if sequence.draft_token_ids and num_logits:
            drafts = sequence.draft_token_ids[: room - (end - start)]
            token_ids += drafts
            num_logits += len(drafts)
        sequence.draft_token_ids = ()  # a later row would verify them beside this one in flight
        sequence.num_scheduled_tokens = start + len(token_ids)
        sequence.num_rows_in_flight += 1
        # The number of accepted drafts is known only when the row is done: until then nothing can follow it.
        sequence.is_verifying = num_logits > 1
        if is_last:
            self._admission.on_prefill_done(sequence, step)
            self._groups.on_history_scheduled(sequence, step)
        readouts = self._readouts.row_readouts(sequence, start, end)
        return Row(sequence.id, sequence.slot, start, token_ids, num_logits, new_pages, init, readouts)

    def prepare_drafts(self, sequence: Sequence, step: int) -> bool:
        """Allocate pages for a sequence's drafts and the token after them; return False if they are dropped.

        They are dropped where pages are missing, where the sequence would outgrow `short_context`, where
        layers keep a state, which cannot go back to the last accepted draft, and where the choice of a token
        depends on the tokens before it in other ways than through the logits: then several cannot be sampled
        at once.
        """
        sampling, num_tokens = sequence.request.sampling, sequence.num_tokens
        end = sequence.max_num_tokens - 1
        if self._short_context is not None and not sequence.is_long:
            end = min(end, self._short_context)
        drafts = sequence.draft_token_ids[: end - num_tokens]
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
            self._admission.on_prefill_done(sequence, step)
        return True

    def apply(
        self, sequences: Mapping[int, Sequence], plan: StepPlan, output: StepOutput
    ) -> Iterator[Progress]:
        """Update the counts of `sequences`; yield those whose rows were sampled, with the sampled tokens.

        Rows of sequences that have ended meanwhile are skipped.
        """
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
                self.num_drafts += num_logits - 1
                self.num_accepted_drafts += max(0, len(sampled) - 1)
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
