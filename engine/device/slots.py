"""State slots: rows of device tensors that live as long as a sequence runs.

A step names slots, and uploads only what changed since the last step. The content of a slot can be rebuilt
from the sequence's history, so preemption simply drops it. The last slot and the last page belong to no
sequence: padded rows use them.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Flag, auto

import numpy as np
import torch

from engine.constraint import WORD_BITS, num_mask_words, pack_mask
from engine.device.staging import upload
from engine.outputs import NO_PAGE, SlotInit
from engine.request import MAX_LOGIT_BIAS, SamplingParams
from models.spec import StateSpec

# The sampling parameters of a slot, in the order of their rows in one table: the last is an integer.
PARAMETERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_k",
)


class LogitEdit(Flag):
    """Reasons to edit a slot's logits before a token is chosen."""

    PENALTIES = auto()
    BIAS = auto()
    MASK = auto()
    MIN_TOKENS = auto()
    CONSTRAINTS = auto()


class StateSlots:
    """Per-sequence state on the device, `[num_slots + 1]` rows each.

    `last_token` int64: the last sampled token, which the host may not know yet. `page_table` int32
    [num_groups, num_slots + 1, max_pages]: of each KV group, in pages of its own size, `page_scales` of which
    are one page of the pool. Sampling parameters fp32 (top_k int32), rows of one table of bits so that
    slots start in one go, and seed int64. `bias_ids` int64 and `bias_values` fp32
    [num_slots + 1, MAX_LOGIT_BIAS], unused entries adding 0 to token 0. `token_masks` int32
    [num_slots + 1, ceil(vocab_size / 32)]: bit `t % 32` of word `t // 32` is set if token t is allowed.
    `output_counts` int32 and `prompt_mask` bool [num_slots + 1, vocab_size] exist from the first request that
    has a penalty, or from the start where graphs need them. `layer_states` [num_slots + 1, *shape] belong to
    layers with a fixed-size state, and are zero where a sequence starts. `is_long` int64
    [num_slots + 1] is 1 for sequences that started with more than `short_context` tokens; None without that
    number.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_pages: int,
        padding_page: int,
        page_scales: tuple[int, ...] = (1,),
        states: tuple[StateSpec, ...] = (),
        short_context: int | None = None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        rows = num_slots + 1
        self.padding_slot = num_slots
        self._padding_page = padding_page
        self._page_scales = np.array(page_scales, np.int64)[:, None]
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        shape = (len(page_scales), rows, max_pages)
        self.page_table = torch.empty(shape, dtype=torch.int32, device=device)
        for table, scale in zip(self.page_table, page_scales, strict=True):
            table.fill_(padding_page * scale)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self._parameters = torch.zeros(len(PARAMETERS), rows, dtype=torch.int32, device=device)
        numbers = self._parameters.view(torch.float32)[:-1]
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition = numbers
        self.top_k = self._parameters[-1]
        self.top_p.fill_(1)
        self.repetition.fill_(1)
        self.bias_ids = torch.zeros(rows, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(rows, MAX_LOGIT_BIAS, device=device)
        num_words = num_mask_words(vocab_size)
        self.token_masks = torch.full((rows, num_words), -1, dtype=torch.int32, device=device)
        self.output_counts: torch.Tensor | None = None
        self.prompt_mask: torch.Tensor | None = None
        self.layer_states = tuple(
            torch.zeros(rows, *state.shape, dtype=state.dtype, device=device) for state in states
        )
        self._short_context = short_context or 0
        self.is_long: torch.Tensor | None = None
        if short_context is not None:
            self.is_long = torch.zeros(rows, dtype=torch.int64, device=device)
        self._num_pages = [0] * rows
        self._edits: dict[int, LogitEdit] = {}
        self._num_logprobs: dict[int, int] = {}
        self._min_tokens: dict[int, tuple[int, SamplingParams]] = {}
        self._base_masks: dict[int, np.ndarray] = {}

    # Starting a slot

    def parameters(self, inits: Sequence[SlotInit]) -> tuple[np.ndarray, np.ndarray]:
        """Return what start() writes: seeds int64 [len(inits)], bits int32 [len(PARAMETERS), len(inits)]."""
        seeds = np.array([init.seed for init in inits], np.int64)
        bits = np.empty((len(PARAMETERS), len(inits)), np.int32)
        *numbers, whole = ([getattr(init.sampling, name) for init in inits] for name in PARAMETERS)
        bits[:-1].view(np.float32)[:] = numbers
        bits[-1] = whole
        return seeds, bits

    def start(
        self,
        inits: Mapping[int, SlotInit],
        slots: torch.Tensor,
        seeds: torch.Tensor,
        parameters: torch.Tensor,
    ) -> None:
        """Set up slots for sequences that take them with this step; `inits` are by slot.

        `slots` int64 [len(inits)] are their keys on the device; `seeds` and `parameters` what `parameters()`
        returned, on the device.
        """
        self.seed[slots] = seeds
        self._parameters[:, slots] = parameters
        for state in self.layer_states:
            state[slots] = 0
        if self.is_long is not None:
            lengths = [len(init.prompt_token_ids) + len(init.output_token_ids) for init in inits.values()]
            is_long = (np.array(lengths) > self._short_context).astype(np.int64)
            (self.is_long[slots],) = upload(self._device, (is_long,))
        for slot, init in inits.items():
            self._start_edits(slot, init)

    def take_columns(self, slot: int, num_pages: int, *, is_new: bool) -> int:
        """Return the column at which the next `num_pages` pages of a slot enter its page table."""
        column = 0 if is_new else self._num_pages[slot]
        self._num_pages[slot] = column + num_pages
        return column

    def to_group_pages(self, pages: np.ndarray) -> np.ndarray:
        """Return pages of the pool, [num_groups, num_pages], as the page tables hold them.

        NO_PAGE becomes the padding page, which holds finite numbers where a kernel reads beyond a window.
        """
        found: np.ndarray = np.where(pages == NO_PAGE, self._padding_page, pages) * self._page_scales
        return found

    def _start_edits(self, slot: int, init: SlotInit) -> None:
        """Set up what few requests use: penalties, bias, mask, log-probabilities."""
        sampling = init.sampling
        if self._edits.pop(slot, None) is not None:
            self.bias_values[slot].zero_()
            self.token_masks[slot].fill_(-1)
        self._num_logprobs.pop(slot, None)
        self._min_tokens.pop(slot, None)
        self._base_masks.pop(slot, None)
        edits = LogitEdit(0)
        if init.constraints:
            edits |= LogitEdit.CONSTRAINTS
        if sampling.logprobs is not None:
            self._num_logprobs[slot] = sampling.logprobs
        if sampling.has_penalties:
            edits |= LogitEdit.PENALTIES
            self._count_history(slot, init)
        if sampling.logit_bias:
            edits |= LogitEdit.BIAS
            ids, values = upload(
                self._device,
                (
                    np.array([token_id for token_id, _ in sampling.logit_bias], np.int64),
                    np.array([value for _, value in sampling.logit_bias], np.float32),
                ),
            )
            self.bias_ids[slot, : len(ids)] = ids
            self.bias_values[slot, : len(ids)] = values
        if sampling.allowed_token_ids or sampling.bad_words_ids:
            edits |= LogitEdit.MASK
        may_end = sampling.min_tokens <= len(init.output_token_ids)
        if not may_end:
            edits |= LogitEdit.MIN_TOKENS
            self._min_tokens[slot] = len(init.prompt_token_ids) + sampling.min_tokens - 1, sampling
        if edits & (LogitEdit.MASK | LogitEdit.MIN_TOKENS):
            self._mask(slot, sampling, may_end=may_end)
        if edits:
            self._edits[slot] = edits

    def allocate_counts(self) -> None:
        """Allocate the token counts that penalties need."""
        if self.output_counts is None:
            shape = (len(self.last_token), self._vocab_size)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self.prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self._device)

    def _count_history(self, slot: int, init: SlotInit) -> None:
        self.allocate_counts()
        assert self.output_counts is not None and self.prompt_mask is not None
        history = (np.array(init.prompt_token_ids, np.int64), np.array(init.output_token_ids, np.int64))
        prompt, outputs = upload(self._device, history)
        self.prompt_mask[slot].zero_()
        self.prompt_mask[slot].index_fill_(0, prompt, True)
        ones = torch.ones(len(outputs), dtype=torch.int32, device=self._device)
        self.output_counts[slot].zero_()
        self.output_counts[slot].index_add_(0, outputs, ones)

    def _mask(self, slot: int, sampling: SamplingParams, *, may_end: bool) -> None:
        """Write the slot's mask: the allowed tokens, without those that would end the sequence too early."""
        bits = np.zeros(self.token_masks.shape[1] * WORD_BITS, np.uint8)
        if sampling.allowed_token_ids:
            bits[list(sampling.allowed_token_ids)] = 1
        else:
            bits[:] = 1
        bits[[ids[0] for ids in sampling.bad_words_ids if len(ids) == 1]] = 0
        if not may_end:
            bits[list(sampling.stop_token_ids.union(self._eos_token_ids))] = 0
        words = pack_mask(bits)
        self._base_masks[slot] = words
        self.write_masks([slot], words[None])

    def base_mask(self, slot: int) -> np.ndarray | None:
        """Return the tokens allowed by the request's sets and `min_tokens`, int32 [num_words]; None: all."""
        return self._base_masks.get(slot)

    def write_masks(self, slots: Sequence[int], words: np.ndarray) -> None:
        """Set the masks of slots; words int32 [len(slots), num_words]."""
        rows, masks = upload(self._device, (np.array(slots, np.int64), words))
        self.token_masks[rows] = masks

    # Asked in every step

    def needs_logit_edits(self, slots: Iterable[int]) -> bool:
        """Return True if the logits of any of these slots are edited before a token is chosen."""
        return not self._edits.keys().isdisjoint(slots)

    def has_logprobs(self, slots: Iterable[int]) -> bool:
        """Return True if any of these slots returns log-probabilities."""
        return not self._num_logprobs.keys().isdisjoint(slots)

    def num_logprobs(self, slot: int) -> int | None:
        """Return how many top log-probabilities a token returns; None: no log-probabilities at all."""
        return self._num_logprobs.get(slot)

    def allow_ends(self, slots: Sequence[int], last_positions: Sequence[int]) -> None:
        """Let sequences end that have `min_tokens`, given the positions of their last tokens."""
        if not self._min_tokens.keys().isdisjoint(slots):
            for slot, position in zip(slots, last_positions, strict=True):
                if slot in self._min_tokens and position >= self._min_tokens[slot][0]:
                    _, sampling = self._min_tokens.pop(slot)
                    self._mask(slot, sampling, may_end=True)
                    self._drop_edit(slot, LogitEdit.MIN_TOKENS)

    def unconstrain(self, slot: int) -> None:
        """Stop masking a slot whose constraints allow everything from now on."""
        self._drop_edit(slot, LogitEdit.CONSTRAINTS)

    def _drop_edit(self, slot: int, edit: LogitEdit) -> None:
        """Remove a reason to edit a slot's logits: edits slow down every row of a step."""
        left = self._edits[slot] & ~edit
        if left:
            self._edits[slot] = left
        else:
            del self._edits[slot]
