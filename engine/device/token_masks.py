"""Computes the token masks of rows with constraints, from the tokens sampled before.

A thread of its own computes the masks of a step while the forward pass of that step runs.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from engine.constraint import WORD_BITS, Matcher, MatchState, pack_mask
from engine.device.slots import StateSlots
from engine.outputs import NO_TOKEN, StepPlan

logger = logging.getLogger("monoloop.engine")


@dataclass(eq=False)
class _Constrained:
    """The matchers of the sequence in a slot, and the tokens they have not read yet."""

    matchers: list[Matcher]
    new_token_ids: list[int] = field(default_factory=list)
    has_begun: bool = False  # from then on it is in every step while it runs


class _Unread(NamedTuple):
    """Sampled tokens, int64 [num_logits] in host memory once `event` is done, and the rows they belong to."""

    tokens: torch.Tensor
    event: torch.cuda.Event | None
    rows: list[tuple[int, _Constrained]]


class Computed(NamedTuple):
    """The masks of a step's constrained rows, words int32 [num_constrained, num_words].

    `problems`, by number of the row: why its mask could not be computed; empty for an internal fault.
    """

    words: np.ndarray
    states: list[MatchState]
    problems: dict[int, str]


class Masks(NamedTuple):
    """The constrained rows of a step, by index and slot, and the future of their masks."""

    indices: list[int]
    slots: list[int]
    computed: "Future[Computed]"


class Outcome(NamedTuple):
    """What masks decided before sampling, by index of the logits position: rows `ended` and `problems`.

    `num_constrained` rows waited for a mask.
    """

    ended: Sequence[int] = ()
    problems: Mapping[int, str] = MappingProxyType({})
    num_constrained: int = 0


class TokenMasks:
    """Runs the matchers of sequences with constraints. All methods are called on the device thread."""

    def __init__(self, slots: StateSlots, vocab_size: int) -> None:
        self._slots = slots
        bits = np.zeros(slots.token_masks.shape[1] * WORD_BITS, np.uint8)
        bits[:vocab_size] = 1
        self._all_tokens = pack_mask(bits)
        self._rows: dict[int, _Constrained] = {}
        self._unread: list[_Unread] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def start(self, plan: StepPlan) -> None:
        """Start the matchers of sequences that take a slot with this step, or take one again."""
        for index, init in plan.inits.items():
            slot = plan.slots[index]
            self._rows.pop(slot, None)
            if init.constraints:
                matchers = [constraint.start() for constraint in init.constraints]
                self._rows[slot] = _Constrained(matchers, list(init.output_token_ids))

    def begin(self, slots: Sequence[int]) -> Masks | None:
        """Start computing the masks of those of these slots, about to be sampled, that need one."""
        if not self._rows:
            return None
        self._forget_ended(slots)
        if self._rows.keys().isdisjoint(slots):
            return None
        indices = [index for index, slot in enumerate(slots) if slot in self._rows]
        chosen = [slots[index] for index in indices]
        unread, self._unread = self._unread, []
        rows = [self._rows[slot] for slot in chosen]
        for row in rows:
            row.has_begun = True
        return Masks(indices, chosen, self._thread.submit(self._compute, unread, rows))

    def _forget_ended(self, slots: Sequence[int]) -> None:
        """Drop sequences whose rows are missing: they have ended or were preempted, without notice."""
        sampled = set(slots)
        for slot in [slot for slot, row in self._rows.items() if row.has_begun and slot not in sampled]:
            del self._rows[slot]
        if not self._rows:
            self._unread.clear()

    def write(self, masks: Masks) -> Outcome:
        """Wait for masks and write them to their slots."""
        words, states, problems = masks.computed.result()
        for slot, row_words in zip(masks.slots, words, strict=True):
            base = self._slots.base_mask(slot)
            if base is not None:
                row_words &= base
        self._slots.write_masks(masks.slots, words)
        has_tokens = [bool(row_words.any()) for row_words in words]
        ended = []
        for index, slot, state, may_go_on in zip(masks.indices, masks.slots, states, has_tokens, strict=True):
            if state is MatchState.DONE:
                del self._rows[slot]
                self._slots.unconstrain(slot)
            if state is not MatchState.MUST_CONTINUE and not may_go_on:
                ended.append(index)
        by_index = {masks.indices[row]: problem for row, problem in problems.items()}
        return Outcome(ended, by_index, len(masks.slots))

    def note(self, masks: Masks, tokens: torch.Tensor, event: torch.cuda.Event | None) -> None:
        """Keep the tokens that are being sampled, for the masks of the next step."""
        rows = [
            (index, self._rows[slot])
            for index, slot in zip(masks.indices, masks.slots, strict=True)
            if slot in self._rows
        ]
        self._unread.append(_Unread(tokens, event, rows))

    def _compute(self, unread: list[_Unread], rows: list[_Constrained]) -> Computed:
        """Compute masks, on the thread for masks."""
        for tokens, event, owners in unread:
            if event is not None:
                event.synchronize()
            token_ids = tokens.tolist()
            for index, owner in owners:
                if token_ids[index] != NO_TOKEN:
                    owner.new_token_ids.append(token_ids[index])
        words = np.tile(self._all_tokens, (len(rows), 1))
        states = [MatchState.DONE] * len(rows)
        problems: dict[int, str] = {}
        by_kind: dict[type[Matcher], list[tuple[int, Matcher]]] = {}
        for index, row in enumerate(rows):
            for matcher in row.matchers:
                by_kind.setdefault(type(matcher), []).append((index, matcher))
        for kind, members in by_kind.items():
            indices = [index for index, _ in members]
            chosen = words[indices]
            try:
                found = kind.fill_masks(
                    [matcher for _, matcher in members],
                    [rows[index].new_token_ids for index in indices],
                    chosen,
                )
            except BaseException:  # what a fault in Rust raises is no Exception
                logger.exception("computing masks failed; the %d requests that need them end", len(members))
                chosen[:] = 0
                found = [MatchState.MUST_CONTINUE] * len(members)
                problems.update(dict.fromkeys(indices, ""))
            else:
                problems.update({index: matcher.problem for index, matcher in members if matcher.problem})
            for index, row_words, state in zip(indices, chosen, found, strict=True):
                words[index] &= row_words
                states[index] = min(states[index], state)
        for row in rows:
            row.new_token_ids = []
        return Computed(words, states, problems)
