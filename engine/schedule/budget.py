"""How many prompt tokens may a step compute beside its decode rows?

All that the token budget leaves, or, if the step is to take no longer than a target, as many as were found to
fit into that time. Whoever decodes waits for every step as a whole, so the target bounds the time between two
tokens of a stream, and what is left of it goes to prompts.
"""

import math

MIN_CHUNK = 16
SMOOTHING = 0.5
# Steps are planned for a little less than the target, since they vary.
AIM = 0.95
# No step has so many times more or less work than the last, whatever that took.
MAX_CHANGE = 4.0
# What attending to one key costs a token, in units of all else that is done for it: between what was found
# for a 1B model on an H100 and for one of 135M on two cores. It only says how chunks change along a prompt,
# so nobody need know it well. To learn it from the steps fails: what they cost once looks like its contrary.
KEY_COST = 2e-4


class StepBudget:
    """Learns from the steps that were computed what prompt tokens cost.

    A step takes the time of its decode rows, known from the steps without prompt tokens, and its prompt
    tokens take the rest: a time once, and a time for their work, which is their number and, at KEY_COST, the
    keys they attend to. If all of it were for the work, a step that took x times what is left of the target
    should have x times less work. What is spent once makes such a correction too small, never too large; so
    steps come to take what they should, and do not swing around it.

    Where even MIN_CHUNK prompt tokens take too long, few do not help: as many more are taken as cost what the
    few cost anyway.
    """

    def __init__(self, max_tokens: int, target_seconds: float | None) -> None:
        self._max_tokens = max_tokens
        self._target_seconds = target_seconds
        self._decode_seconds = 0.0
        self._few_seconds = 0.0  # what MIN_CHUNK prompt tokens take, at most
        self._work = float(MIN_CHUNK)  # what takes a step to the target

    def prefill_tokens(self, num_decode_rows: int, context: int) -> int:
        """Prompt tokens of the next step, behind `context` others of their prompt.

        Never none, if there is room: prompts come through in any case.
        """
        room = self._max_tokens - num_decode_rows
        if self._target_seconds is None or num_decode_rows == 0:
            return room
        # work = tokens * (1 + KEY_COST * (context + tokens / 2))
        each = 1.0 + KEY_COST * context
        tokens = 2.0 * self._work / (each + math.sqrt(each * each + 2.0 * KEY_COST * self._work))
        return min(room, max(round(tokens), MIN_CHUNK))

    def observe(self, num_decode_rows: int, num_prefill_tokens: int, num_keys: float, seconds: float) -> None:
        """A step of so many rows and prompt tokens, which attended to so many keys, took `seconds`."""
        if self._target_seconds is None:
            return
        if num_prefill_tokens == 0:
            old = self._decode_seconds
            self._decode_seconds = old + SMOOTHING * (seconds - old) if old else seconds
        elif num_prefill_tokens >= MIN_CHUNK:
            taken = max(seconds - self._decode_seconds, 0.0) if num_decode_rows else seconds
            work = num_prefill_tokens + KEY_COST * num_keys
            self._correct(num_prefill_tokens, work, taken, AIM * self._target_seconds)

    def _correct(self, num_tokens: int, work: float, taken: float, aim_seconds: float) -> None:
        if num_tokens == MIN_CHUNK or taken < self._few_seconds:  # fewer tokens cannot take longer than more
            self._few_seconds = taken
        left = aim_seconds - self._decode_seconds
        if self._few_seconds > left:
            left = 2.0 * self._few_seconds
        change = min(max(left / taken, 1.0 / MAX_CHANGE), MAX_CHANGE) if taken else MAX_CHANGE
        # The end of a prompt is a small chunk, which says nothing against a large one.
        choose = max if change >= 1.0 else min
        self._work = max(choose(change * work, self._work), MIN_CHUNK)
