"""StepPlan -> the tensors a forward pass takes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.pooling import pooled_tokens
from engine.device.slots import StateSlots
from engine.device.staging import upload
from engine.outputs import NO_PAGE, Row, StepPlan
from kernels.paged_attention import AttentionBatch
from kernels.step_inputs import (
    FIRST_COLUMN,
    FIRST_KNOWN,
    FIRST_NEW_PAGE,
    FIRST_TOKEN,
    NUM_COLUMNS,
    NUM_NEW_PAGES,
    NUM_TOKENS,
    SAMPLED,
    SLOT,
    START,
    StepInputs,
    step_inputs,
)
from models.forward_batch import ForwardBatch


@dataclass(frozen=True)
class StepBatch:
    """A step on the device: what its forward pass reads, which of its rows are sampled, what is scored.

    The forward pass returns the hidden states at `hidden_indices`: tokens to sample from, then the tokens
    before `scored` int64 [num_scored], whose log-probabilities are returned, then tokens that are pooled.
    `slots_host`: the slots of the tokens to be sampled; `newest_host`: the positions before.
    `query_lens` and `context_lens` are int64 [num_rows].
    """

    inputs: StepInputs
    hidden_indices: torch.Tensor
    scored: torch.Tensor
    slots_host: list[int]
    newest_host: list[int]
    query_lens: np.ndarray
    context_lens: np.ndarray
    num_single_rows: int

    @property
    def forward(self) -> ForwardBatch:
        """What the model takes, of a step that has its inputs to itself."""
        inputs = self.inputs
        attention = AttentionBatch(
            page_table=inputs.page_table,
            query_start=inputs.query_start,
            context_lens=inputs.context_lens,
            slot_mapping=inputs.slot_mapping,
            num_decode_rows=self.num_single_rows,
            query_lens=self.query_lens.tolist(),
            context_lens_host=self.context_lens.tolist(),
        )
        return ForwardBatch(inputs.token_ids, inputs.positions, attention, self.hidden_indices)

    @property
    def sampled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and positions, int64 [num_sampled], of the tokens that will be sampled."""
        num_sampled = len(self.slots_host)
        return self.inputs.sampled_slots[:num_sampled], self.inputs.sampled_positions[:num_sampled] + 1


def build_batch(
    plan: StepPlan,
    slots: StateSlots,
    page_size: int,
    device: torch.device,
    inputs: StepInputs | None = None,
) -> StepBatch:
    """Stage the plan's changes into `slots` and draw up its batch: in `inputs` of a graph, if given."""
    chunks = plan.chunks
    rows, new_pages = _rows(plan, page_size)
    context_lens = rows[START] + rows[NUM_TOKENS]
    is_sampled = rows[SAMPLED] >= 0
    sampled_slots = rows[SLOT, is_sampled].tolist()
    first_tokens = rows[FIRST_TOKEN, len(plan.decode.slots) :]
    before_scored, scored = _scored(chunks, first_tokens)
    others = np.concatenate((before_scored, pooled_tokens(chunks, first_tokens)))
    known = np.fromiter(
        itertools.chain.from_iterable(row.token_ids for row in chunks),
        np.int64,
        plan.num_tokens - len(plan.decode.slots),
    )
    started = [row for row in chunks if row.init is not None]
    starts: tuple[np.ndarray, ...] = ()
    if started:
        inits = [row.init for row in started if row.init is not None]
        starts = (np.array([row.slot for row in started], np.int64), *slots.parameters(inits))
    on_device = upload(device, (rows, known, new_pages, others, scored, *starts))
    device_rows, device_known, device_pages, device_others, device_scored = on_device[:5]
    if started:
        slots.start(started, *on_device[5:])
    if inputs is None:
        num_pages = -(-int(context_lens.max()) // page_size)
        inputs = StepInputs.empty(plan.num_tokens, plan.num_rows, num_pages, len(sampled_slots), device)
    step_inputs(
        device_rows,
        device_known,
        device_pages,
        slots.last_token,
        slots.page_table,
        inputs,
        num_tokens=plan.num_tokens,
        num_sampled=len(sampled_slots),
        page_size=page_size,
        dummy_slot=slots.dummy_page * page_size,
        nobody=slots.nobody,
    )
    logits_indices = inputs.logits_indices[: len(sampled_slots)]
    return StepBatch(
        inputs=inputs,
        hidden_indices=torch.cat((logits_indices, device_others)) if len(others) else logits_indices,
        scored=device_scored,
        slots_host=sampled_slots,
        newest_host=(context_lens[is_sampled] - 1).tolist(),
        query_lens=rows[NUM_TOKENS],
        context_lens=context_lens,
        num_single_rows=len(plan.decode.slots) + sum(row.num_tokens == 1 for row in chunks),
    )


def _rows(plan: StepPlan, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """What `step_inputs` is told: int64 [NUM_COLUMNS, num_rows], and all new pages, int64, row after row."""
    decode, chunks = plan.decode, plan.chunks
    num_decode = len(decode.slots)
    rows = np.empty((NUM_COLUMNS, plan.num_rows), np.int64)
    rows[SLOT] = [*decode.slots, *(row.slot for row in chunks)]
    rows[START] = [*decode.starts, *(row.start for row in chunks)]
    rows[NUM_TOKENS, :num_decode] = 1
    rows[NUM_TOKENS, num_decode:] = [row.num_tokens for row in chunks]
    rows[FIRST_TOKEN] = rows[NUM_TOKENS].cumsum() - rows[NUM_TOKENS]
    rows[FIRST_KNOWN, :num_decode] = -1
    rows[FIRST_KNOWN, num_decode:] = rows[FIRST_TOKEN, num_decode:] - num_decode
    rows[FIRST_COLUMN] = rows[START] // page_size
    rows[FIRST_COLUMN, num_decode:] = [0 if row.init else -(-row.start // page_size) for row in chunks]
    pages_of_decode = np.array(decode.new_pages, np.int64)
    has_page = pages_of_decode != NO_PAGE
    rows[NUM_NEW_PAGES, :num_decode] = has_page
    rows[NUM_NEW_PAGES, num_decode:] = [len(row.new_pages) for row in chunks]
    rows[FIRST_NEW_PAGE] = rows[NUM_NEW_PAGES].cumsum() - rows[NUM_NEW_PAGES]
    is_sampled = np.array([True] * num_decode + [row.sample for row in chunks])
    rows[SAMPLED] = np.where(is_sampled, is_sampled.cumsum() - 1, -1)
    pages_of_chunks = [page for row in chunks for page in row.new_pages]
    return rows, np.concatenate((pages_of_decode[has_page], np.array(pages_of_chunks, np.int64)))


def _scored(chunks: Sequence[Row], first_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in the step of the tokens in front of the scored ones, and the scored ones: int64 [num_scored].

    first_tokens int64 [at least len(chunks)]: place of the first token of each chunk.
    """
    places = [
        np.arange(len(row.scored.token_ids)) + (first + row.scored.start - row.start)
        for row, first in zip(chunks, first_tokens, strict=False)
        if row.scored is not None
    ]
    token_ids = [token_id for row in chunks if row.scored is not None for token_id in row.scored.token_ids]
    empty = np.zeros(0, np.int64)
    return np.concatenate((empty, *places)), np.array(token_ids, np.int64)
