"""State slots: rows of device tensors that live as long as a sequence runs.

A step names slots, and only what changed since the last step is staged. What a slot holds can be rebuilt
from the sequence's history, so preemption simply drops it. The last slot belongs to nobody, and so does the
last page: padded rows use them.
"""

from collections.abc import Iterable, Sequence
from enum import Flag, auto

import numpy as np
import torch

from engine.constraint import WORD_BITS, num_mask_words, pack_mask
from engine.device.staging import upload
from engine.outputs import Row, SlotInit
from engine.request import MAX_LOGIT_BIAS, SamplingParams

# The sampling parameters a slot holds, in the order of their rows in one table: the last is a whole number.
PARAMETERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_k",
)


class Edit(Flag):
    """What is done to a slot's logits before a token is chosen."""

    PENALTIES = auto()
    BIAS = auto()
    MASK = auto()
    MIN_TOKENS = auto()
    CONSTRAINTS = auto()


class StateSlots:
    """Per-sequence state on the device, `[num_slots + 1]` rows each.

    `last_token` int64: the newest token, which the host may not know yet. `page_table` int32
    [num_slots + 1, max_pages]. Sampling parameters fp32 (top_k int32), rows of one table of bits so that
    slots start in one go, and seed int64. `bias_ids` int64 and `bias_values` fp32
    [num_slots + 1, MAX_LOGIT_BIAS], unused entries adding 0 to token 0. `token_masks` int32
    [num_slots + 1, ceil(vocab_size / 32)]: bit `t % 32` of word `t // 32` is set if token t is allowed.
    `output_counts` int32 and `prompt_mask` bool [num_slots + 1, vocab_size] exist from the first request that
    has a penalty, or from the start where graphs need them.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_pages: int,
        dummy_page: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        rows = num_slots + 1
        self.nobody = num_slots
        self.dummy_page = dummy_page
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_table = torch.full((rows, max_pages), dummy_page, dtype=torch.int32, device=device)
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
        self._edits: dict[int, Edit] = {}
        self._wants_logprobs: dict[int, int] = {}
        self._min_tokens: dict[int, tuple[int, SamplingParams]] = {}
        self._base_masks: dict[int, np.ndarray] = {}

    # What a slot starts from

    def parameters(self, inits: Sequence[SlotInit]) -> tuple[np.ndarray, np.ndarray]:
        """What `start` writes: seeds int64 [len(inits)], and the bits int32 [len(PARAMETERS), len(inits)]."""
        seeds = np.array([init.seed for init in inits], np.int64)
        bits = np.empty((len(PARAMETERS), len(inits)), np.int32)
        *numbers, whole = ([getattr(init.sampling, name) for init in inits] for name in PARAMETERS)
        bits[:-1].view(np.float32)[:] = numbers
        bits[-1] = whole
        return seeds, bits

    def start(
        self, rows: Sequence[Row], slots: torch.Tensor, seeds: torch.Tensor, parameters: torch.Tensor
    ) -> None:
        """Set up the slots (int64 [len(rows)] on the device) of rows whose sequences take one with this step.

        `seeds` and `parameters` are what the method of that name gave, on the device.
        """
        self.seed[slots] = seeds
        self._parameters[:, slots] = parameters
        for row in rows:
            assert row.init is not None
            self._start_edits(row.slot, row.init)

    def _start_edits(self, slot: int, init: SlotInit) -> None:
        """Set up what a few requests have: penalties, bias, mask, log-probabilities."""
        sampling = init.sampling
        if self._edits.pop(slot, None) is not None:
            self.bias_values[slot].zero_()
            self.token_masks[slot].fill_(-1)
        self._wants_logprobs.pop(slot, None)
        self._min_tokens.pop(slot, None)
        self._base_masks.pop(slot, None)
        edits = Edit(0)
        if init.constraints:
            edits |= Edit.CONSTRAINTS
        if sampling.logprobs is not None:
            self._wants_logprobs[slot] = sampling.logprobs
        if sampling.has_penalties:
            edits |= Edit.PENALTIES
            self._count_history(slot, init)
        if sampling.logit_bias:
            edits |= Edit.BIAS
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
            edits |= Edit.MASK
        may_end = sampling.min_tokens <= len(init.output_token_ids)
        if not may_end:
            edits |= Edit.MIN_TOKENS
            self._min_tokens[slot] = len(init.prompt_token_ids) + sampling.min_tokens - 1, sampling
        if edits & (Edit.MASK | Edit.MIN_TOKENS):
            self._mask(slot, sampling, may_end=may_end)
        if edits:
            self._edits[slot] = edits

    def allocate_counts(self) -> None:
        """Make room for what penalties need to remember."""
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
        """Write the slot's mask: what is allowed, without what would end the sequence too early."""
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
        """What holds for the whole output, and `min_tokens`, leave: int32 [num_words]; None if everything."""
        return self._base_masks.get(slot)

    def write_masks(self, slots: Sequence[int], words: np.ndarray) -> None:
        """Set the masks of slots; words int32 [len(slots), num_words]."""
        rows, masks = upload(self._device, (np.array(slots, np.int64), words))
        self.token_masks[rows] = masks

    # Questions of every step

    def needs_edits(self, slots: Iterable[int]) -> bool:
        """Whether the logits of any of these slots are edited before a token is chosen."""
        return not self._edits.keys().isdisjoint(slots)

    def wants_logprobs(self, slots: Iterable[int]) -> bool:
        """Whether the log-probabilities of any of these slots are told."""
        return not self._wants_logprobs.keys().isdisjoint(slots)

    def num_logprobs(self, slot: int) -> int | None:
        """How many most likely tokens are told beside the chosen one; None: not even that one."""
        return self._wants_logprobs.get(slot)

    def allow_ends(self, slots: Sequence[int], newest: Sequence[int]) -> None:
        """Let sequences end from now on that have `min_tokens`; `newest`: position of their last token."""
        if not self._min_tokens.keys().isdisjoint(slots):
            for slot, position in zip(slots, newest, strict=True):
                if slot in self._min_tokens and position >= self._min_tokens[slot][0]:
                    _, sampling = self._min_tokens.pop(slot)
                    self._mask(slot, sampling, may_end=True)
                    self._settle(slot, Edit.MIN_TOKENS)

    def unconstrain(self, slot: int) -> None:
        """No constraint will hold for the sequence in this slot any more; its mask is the one without any."""
        self._settle(slot, Edit.CONSTRAINTS)

    def _settle(self, slot: int, edit: Edit) -> None:
        """One reason less to edit a slot's logits, which would cost everybody in its steps."""
        left = self._edits[slot] & ~edit
        if left:
            self._edits[slot] = left
        else:
            del self._edits[slot]
