"""Frozen values that pass between the loop and the other threads.

loop --StepPlan--> device thread --StepOutput--> loop --DetokenizeJob--> detokenizer --TextDelta--> loop
"""

from enum import StrEnum
from typing import NamedTuple

from engine.request import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended. The values are the labels of `request_success_total{finished_reason}`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SlotInit(NamedTuple):
    """What a state slot starts from when a sequence takes it (first run, or resume after preemption)."""

    sampling: SamplingParams
    seed: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


class Row(NamedTuple):
    """The part of a step that belongs to one sequence: `num_tokens` tokens from position `start`.

    `token_ids` None means one token that only the device knows yet: the newest of the slot.
    `new_pages` are appended to the slot's page table before the step. With `sample` the logits of the
    last token are sampled, the token becomes the slot's newest and is returned.
    """

    sequence_id: int
    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] | None
    sample: bool
    new_pages: tuple[int, ...] = ()
    init: SlotInit | None = None
    epoch: int = 0


class StepPlan(NamedTuple):
    """One step of the device: rows with exactly one token stand first (`num_decode_rows` of them)."""

    step_id: int
    rows: tuple[Row, ...]
    num_decode_rows: int
    num_tokens: int


class StepOutput(NamedTuple):
    """What a step computed: for each row of the plan the sampled tokens (none without `sample`).

    `start_seconds` and `end_seconds` are the device's own times of the step on one clock.
    """

    step_id: int
    tokens: tuple[tuple[int, ...], ...]
    start_seconds: float
    end_seconds: float


class TextDelta(NamedTuple):
    """What became visible of one request since its last delta. Deltas join by concatenation."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
