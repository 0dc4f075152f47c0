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
from models.decoder import ForwardBatch


@dataclass(frozen=True)
class StepBatch:
    """A step on the device: the forward pass's input, which of its rows are sampled, what is scored.

    The forward pass is asked for the tokens to be sampled from, behind them for those in front of `scored`
    int64 [num_scored], the tokens whose log-probabilities are wanted, and at last for those that are pooled.
    `slots` and `positions`, both int64 [num_sampled]: slot and position of the tokens to be sampled;
    `slots_host`: the slots as a list, and `newest_host`: the positions before.
    """

    forward: ForwardBatch
    slots: torch.Tensor
    positions: torch.Tensor
    slots_host: list[int]
    newest_host: list[int]
    scored: torch.Tensor


def build_batch(plan: StepPlan, slots: StateSlots, page_size: int, device: torch.device) -> StepBatch:
    """Stage the plan's changes into `slots` and draw up its batch."""
    num_decode = len(plan.decode.slots)
    chunks = plan.chunks
    row_slots = np.array([*plan.decode.slots, *(row.slot for row in chunks)], np.int64)
    starts = np.array([*plan.decode.starts, *(row.start for row in chunks)], np.int64)
    query_lens = np.array([1] * num_decode + [row.num_tokens for row in chunks], np.int64)
    context_lens = starts + query_lens
    query_start = np.zeros(plan.num_rows + 1, np.int64)
    np.cumsum(query_lens, out=query_start[1:])
    sampled = [*range(num_decode), *(index for index, row in enumerate(chunks, num_decode) if row.sample)]
    started = [row for row in chunks if row.init is not None]
    num_known = plan.num_tokens - num_decode
    before_scored, scored = _scored(chunks, query_start[num_decode:])
    pooled = pooled_tokens(chunks, query_start[num_decode:])
    on_device = upload(
        device,
        (
            row_slots,
            context_lens,
            query_start,
            np.arange(plan.num_tokens) + np.repeat(starts - query_start[:-1], query_lens),
            np.repeat(np.arange(plan.num_rows), query_lens),
            np.fromiter(itertools.chain.from_iterable(row.token_ids for row in chunks), np.int64, num_known),
            np.concatenate((query_start[1:][sampled] - 1, before_scored, pooled)),
            scored,
            row_slots[sampled],
            context_lens[sampled],
            _new_pages(plan, page_size),
            np.array([row.slot for row in started], np.int64),
            *slots.parameters([row.init for row in started if row.init is not None]),
        ),
    )
    device_slots, device_lens, device_query_start, positions, token_rows, known = on_device[:6]
    wanted, scored_tokens, sampled_slots, sampled_positions, new_pages = on_device[6:11]
    if started:
        slots.start(started, *on_device[11:])
    slots.page_table[new_pages[0], new_pages[1]] = new_pages[2].to(torch.int32)
    page_table = slots.page_table[device_slots, : -(-int(context_lens.max()) // page_size)]
    page = page_table[token_rows, positions // page_size].to(torch.int64)
    attention = AttentionBatch(
        page_table=page_table,
        query_start=device_query_start.to(torch.int32),
        context_lens=device_lens.to(torch.int32),
        slot_mapping=page * page_size + positions % page_size,
        num_decode_rows=num_decode + sum(row.num_tokens == 1 for row in chunks),
        query_lens=query_lens.tolist(),
        context_lens_host=context_lens.tolist(),
    )
    token_ids = torch.cat((slots.last_token[device_slots[:num_decode]], known))
    return StepBatch(
        forward=ForwardBatch(token_ids, positions, attention, wanted),
        slots=sampled_slots,
        positions=sampled_positions,
        slots_host=row_slots[sampled].tolist(),
        newest_host=(context_lens[sampled] - 1).tolist(),
        scored=scored_tokens,
    )


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


def _new_pages(plan: StepPlan, page_size: int) -> np.ndarray:
    """Entries for the page tables, int64 [3, number of new pages]: slot, column, page."""
    entries = [
        (slot, start // page_size, page)
        for slot, start, page in zip(
            plan.decode.slots, plan.decode.starts, plan.decode.new_pages, strict=True
        )
        if page != NO_PAGE
    ]
    for row in plan.chunks:
        first = 0 if row.init is not None else -(-row.start // page_size)
        entries += [(row.slot, column, page) for column, page in enumerate(row.new_pages, first)]
    return np.array(entries, np.int64).reshape(-1, 3).T.copy()
