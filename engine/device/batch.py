"""StepPlan -> the tensors a forward pass takes."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.slots import StateSlots
from engine.outputs import StepPlan
from kernels.paged_attention import AttentionBatch
from models.decoder import ForwardBatch


@dataclass(frozen=True)
class StepBatch:
    """A step on the device: the forward pass's input, and which of its rows are sampled.

    `logits_positions` int64 [num_sampled]: tokens whose logits are wanted. `slots` and `positions`, both
    int64 [num_sampled]: slot and position of the tokens to be sampled; `slots_host`: the same as a list.
    `num_outputs`: output tokens each sampled row has already.
    """

    forward: ForwardBatch
    logits_positions: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    slots_host: list[int]
    num_outputs: list[int]


def build_batch(plan: StepPlan, slots: StateSlots, page_size: int, device: torch.device) -> StepBatch:
    """Stage the plan's changes into `slots` and draw up its batch."""
    slots.start(plan.rows)
    slots.append_pages(plan.rows)
    rows = plan.rows
    row_slots = np.fromiter((row.slot for row in rows), np.int64, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    query_lens = np.fromiter((row.num_tokens for row in rows), np.int64, len(rows))
    context_lens = starts + query_lens
    query_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(query_lens, out=query_start[1:])
    positions = np.arange(plan.num_tokens) + np.repeat(starts - query_start[:-1], query_lens)

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    row_slots_device = to_device(row_slots)
    positions_device = to_device(positions)
    max_pages = -(-int(context_lens.max()) // page_size)
    page_table = slots.page_table[row_slots_device, :max_pages]
    token_rows = to_device(np.repeat(np.arange(len(rows)), query_lens))
    page = page_table[token_rows, positions_device // page_size].to(torch.int64)
    attention = AttentionBatch(
        page_table=page_table,
        query_start=to_device(query_start.astype(np.int32)),
        context_lens=to_device(context_lens.astype(np.int32)),
        slot_mapping=page * page_size + positions_device % page_size,
        num_decode_rows=plan.num_decode_rows,
        query_lens=query_lens.tolist(),
        context_lens_host=context_lens.tolist(),
    )
    sampled = [index for index, row in enumerate(rows) if row.sample]
    sampled_slots = row_slots[sampled]
    return StepBatch(
        forward=ForwardBatch(
            token_ids=_token_ids(plan, slots, row_slots_device, device),
            positions=positions_device,
            attention=attention,
        ),
        logits_positions=to_device(query_start[1:][sampled] - 1),
        slots=to_device(sampled_slots),
        positions=to_device(context_lens[sampled]),
        slots_host=sampled_slots.tolist(),
        num_outputs=[
            rows[index].start + rows[index].num_tokens - len(slots.inits[rows[index].slot].prompt_token_ids)
            for index in sampled
        ],
    )


def _token_ids(
    plan: StepPlan, slots: StateSlots, row_slots: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Tokens of the step [num_tokens] int64: those the host knows, and the newest of the other slots."""
    in_slot = [index for index, row in enumerate(plan.rows) if row.token_ids is None]
    if len(in_slot) == len(plan.rows):
        return slots.last_token[row_slots]
    known = np.fromiter(
        itertools.chain.from_iterable(row.token_ids or (0,) for row in plan.rows), np.int64, plan.num_tokens
    )
    token_ids = torch.from_numpy(known).to(device)
    if in_slot:
        # Rows without known tokens have one token each and stand among the single-token rows, which come
        # first: row i is token i there.
        index = torch.tensor(in_slot, device=device)
        token_ids[index] = slots.last_token[row_slots[index]]
    return token_ids
