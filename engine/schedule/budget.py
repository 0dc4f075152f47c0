"""Limits the prompt tokens of a step, by the token budget and by a target for the time of a step.

Every decoding sequence waits for the whole step. So the target bounds the time between two tokens of a
stream, and prompt tokens get the time that the decode rows leave of it.
"""

import math

MIN_CHUNK = 16
SMOOTHING = 0.5
# Steps are planned for a little less than the target, because their times vary.
AIM = 0.95
# Largest change of the work from one step to the next.
MAX_CHANGE = 4.0
# Cost of attending to one key, relative to the rest of a token's cost. A value between those measured for a
# 1B model on an H100 and a 135M model on two CPU cores. It only shapes the chunk sizes along a prompt, so a
# rough value is enough. Fitting it online fails: a step's fixed cost is indistinguishable from a negative
# value.
KEY_COST = 2e-4


class StepBudget:
    """Learns the cost of prompt tokens from the times of computed steps.

    The time of the decode rows is known from steps without prompt tokens; the prompt tokens of a step take
    the rest. That rest is a fixed time plus a time proportional to their work: the number of tokens and, at
    KEY_COST each, the keys they attend to. If all of it were proportional, a step that took x times the time
    left for prompts should have had x times less work. The fixed part makes this correction too small, never
    too large, so the times of steps approach the target without oscillating.

    If even MIN_CHUNK prompt tokens take too long, small chunks do not help. Then a step gets as many prompt
    tokens as fit into twice the time of MIN_CHUNK.
    """

    def __init__(self, max_tokens: int, target_seconds: float | None) -> None:
        self._max_tokens = max_tokens
        self._target_seconds = target_seconds
        self._decode_seconds = 0.0
        self._few_seconds = 0.0  # upper bound of the time of MIN_CHUNK prompt tokens
        self._work = float(MIN_CHUNK)  # work with which a step takes the target time

    def prefill_tokens(self, num_decode_rows: int, context: int) -> int:
        """Return how many prompt tokens the next step may have, after `context` others of their prompt.

        At least one if the token budget has room, so that prompts always make progress.
        """
        room = self._max_tokens - num_decode_rows
        if self._target_seconds is None or num_decode_rows == 0:
            return room
        # work = tokens * (1 + KEY_COST * (context + tokens / 2))
        each = 1.0 + KEY_COST * context
        tokens = 2.0 * self._work / (each + math.sqrt(each * each + 2.0 * KEY_COST * self._work))
        return min(room, max(round(tokens), MIN_CHUNK))

    def observe(self, num_decode_rows: int, num_prefill_tokens: int, num_keys: float, seconds: float) -> None:
        """Learn from a step that took `seconds`; its prompt tokens attended to `num_keys` keys together."""
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
        # The last chunk of a prompt may be small; that is no reason to make later chunks small.
        choose = max if change >= 1.0 else min
        self._work = max(choose(change * work, self._work), MIN_CHUNK)
