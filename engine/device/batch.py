"""Builds the tensors a forward pass reads from a StepPlan."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.readouts import StepReadouts, readouts_of
from engine.device.slots import StateSlots
from engine.device.staging import upload
from engine.outputs import StepPlan
from kernels.paged_attention import AttentionBatch
from kernels.step_inputs import (
    FIRST_COLUMN,
    FIRST_HOST_TOKEN,
    FIRST_LOGITS,
    FIRST_NEW_PAGE,
    FIRST_TOKEN,
    NUM_COLUMNS,
    NUM_LOGITS,
    NUM_NEW_PAGES,
    NUM_TOKENS,
    SLOT,
    START,
    StepInputs,
    step_inputs,
)
from models.decoder import Decoder
from models.forward_batch import ForwardBatch


@dataclass(frozen=True)
class StepBatch:
    """A step on the device: the inputs of its forward pass, and which hidden states are used for what.

    `hidden_indices` int64 [num_hidden]: tokens whose hidden states are returned: the logits positions, then
    those that `readouts` read. `logits_slots` and `last_positions` are, by logits position, the slot and
    position of its token. `query_lens` and `context_lens` are int64 [num_rows].
    """

    inputs: StepInputs
    hidden_indices: torch.Tensor
    logits_slots: list[int]
    last_positions: list[int]
    readouts: StepReadouts
    query_lens: np.ndarray
    context_lens: np.ndarray
    num_single_rows: int
    states: tuple[torch.Tensor, ...]
    is_long: torch.Tensor | None

    @property
    def num_logits(self) -> int:
        """Number of logits positions."""
        return len(self.logits_slots)

    @property
    def forward(self) -> ForwardBatch:
        """Return the batch for a model, of a step that has its inputs to itself."""
        inputs = self.inputs
        query_lens, context_lens = self.query_lens.tolist(), self.context_lens.tolist()
        attention = tuple(
            AttentionBatch(
                page_table=page_table,
                query_start=inputs.query_start,
                context_lens=inputs.context_lens,
                slot_mapping=slot_mapping,
                num_decode_rows=self.num_single_rows,
                query_lens=query_lens,
                context_lens_host=context_lens,
            )
            for page_table, slot_mapping in zip(inputs.page_table, inputs.slot_mapping, strict=True)
        )
        return ForwardBatch(
            inputs.token_ids,
            inputs.positions,
            attention,
            self.states,
            inputs.row_slots,
            self.is_long,
            self.hidden_indices,
        )

    @property
    def sampled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and positions, int64 [num_logits], of the tokens that will be sampled."""
        slots, positions = self.inputs.logits_slots, self.inputs.logits_positions
        return slots[: self.num_logits], positions[: self.num_logits] + 1


def build_batch(
    plan: StepPlan,
    slots: StateSlots,
    page_size: int,
    device: torch.device,
    inputs: StepInputs | None = None,
) -> StepBatch:
    """Write the plan's changes to `slots` and build its batch, in the `inputs` of a graph if given."""
    rows, new_pages = _rows(plan, slots)
    context_lens = rows[START] + rows[NUM_TOKENS]
    host_token_ids = np.fromiter(itertools.chain.from_iterable(plan.token_ids.values()), np.int64)
    if plan.num_logits.count(1) == plan.num_rows:
        logits_slots, last_positions = plan.slots, (context_lens - 1).tolist()
    else:
        logits_rows = np.repeat(np.arange(plan.num_rows), rows[NUM_LOGITS])
        logits_slots = rows[SLOT, logits_rows].tolist()
        back = (rows[FIRST_LOGITS] + rows[NUM_LOGITS])[logits_rows] - np.arange(len(logits_rows))
        last_positions = (context_lens[logits_rows] - back).tolist()
    readouts = readouts_of(plan, rows[FIRST_TOKEN])
    starts: tuple[np.ndarray, ...] = ()
    inits = {plan.slots[row]: init for row, init in plan.inits.items()}
    if inits:
        starts = (np.fromiter(inits, np.int64), *slots.parameters(list(inits.values())))
    on_device = upload(device, (rows, host_token_ids, new_pages, readouts.token_indices, *starts))
    device_rows, device_token_ids, device_pages, readout_indices = on_device[:4]
    if inits:
        slots.start(inits, *on_device[4:])
    if inputs is None:
        num_pages = -(-int(context_lens.max()) // page_size)
        num_groups = slots.page_table.shape[0]
        inputs = StepInputs.empty(
            plan.num_tokens, plan.num_rows, num_pages, len(logits_slots), device, num_groups
        )
    step_inputs(
        device_rows,
        device_token_ids,
        device_pages,
        slots.last_token,
        slots.page_table,
        inputs,
        num_tokens=plan.num_tokens,
        num_logits=len(logits_slots),
        page_size=page_size,
        padding_slot=slots.padding_slot,
    )
    hidden_indices = inputs.logits_indices[: len(logits_slots)]
    if len(readout_indices):
        hidden_indices = torch.cat((hidden_indices, readout_indices))
    return StepBatch(
        inputs=inputs,
        hidden_indices=hidden_indices,
        logits_slots=logits_slots,
        last_positions=last_positions,
        readouts=readouts,
        query_lens=rows[NUM_TOKENS],
        context_lens=context_lens,
        num_single_rows=int(np.count_nonzero(rows[NUM_TOKENS] == 1)),
        states=slots.layer_states,
        is_long=slots.is_long,
    )


def _rows(plan: StepPlan, slots: StateSlots) -> tuple[np.ndarray, np.ndarray]:
    """Return the records of `step_inputs`, int64 [NUM_COLUMNS, num_rows], and new pages [num_groups, ...]."""
    num_decode = plan.num_decode_rows
    rows = np.zeros((NUM_COLUMNS, plan.num_rows), np.int64)
    rows[SLOT], rows[START] = plan.slots, plan.starts
    for counts, (count, first) in (
        (plan.query_lens, (NUM_TOKENS, FIRST_TOKEN)),
        (plan.num_logits, (NUM_LOGITS, FIRST_LOGITS)),
    ):
        rows[count] = counts
        rows[first, 1:] = rows[count, :-1].cumsum()
    rows[FIRST_HOST_TOKEN, :num_decode] = -1
    if num_decode < plan.num_rows:
        rows[FIRST_HOST_TOKEN, num_decode:] = rows[FIRST_TOKEN, num_decode:] - num_decode
    if not plan.new_pages:
        return rows, np.zeros((len(slots.page_table), 0), np.int64)
    new_pages: list[list[int]] = [[] for _ in range(len(slots.page_table))]
    for row, pages in plan.new_pages.items():
        num_pages = len(pages[0])
        rows[FIRST_NEW_PAGE, row] = len(new_pages[0])
        rows[NUM_NEW_PAGES, row] = num_pages
        rows[FIRST_COLUMN, row] = slots.take_columns(plan.slots[row], num_pages, is_new=row in plan.inits)
        for group, of_group in zip(new_pages, pages, strict=True):
            group += of_group
    return rows, slots.to_group_pages(np.array(new_pages, np.int64))


def trial_batch(model: Decoder, num_tokens: int, page_size: int) -> ForwardBatch:
    """Return a step of one row without a plan; all its keys and values are written to page 0."""
    device, spec = model.device, model.spec
    positions = torch.arange(num_tokens, device=device)
    attention = AttentionBatch(
        page_table=torch.zeros(1, -(-num_tokens // page_size), dtype=torch.int32, device=device),
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        slot_mapping=positions % page_size,
        num_decode_rows=int(num_tokens == 1),
        query_lens=[num_tokens],
        context_lens_host=[num_tokens],
    )
    return ForwardBatch(
        torch.zeros_like(positions),
        positions,
        (attention,) * len(spec.kv_groups),
        tuple(torch.zeros(1, *state.shape, dtype=state.dtype, device=device) for state in spec.states),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
