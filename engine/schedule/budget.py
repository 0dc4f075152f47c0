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
# What attending to one key costs, in units of all else that is done for a token: before anything is known, as
# found for a 1B model on an H100; a model of 135M parameters has half of it on a laptop.
KEY_COST = 3e-4


class StepBudget:
    """Learns from the steps that were computed what prompt tokens cost.

    A step takes the time of its decode rows, known from the steps without prompt tokens, and its prompt
    tokens take the rest: a time once, and a time for their work, which is their number and, at `KeyCost`, the
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
        self._few_seconds = 0.0  # what MIN_CHUNK prompt tokens take
        self._key_cost = KeyCost()
        self._work = float(MIN_CHUNK)  # what takes a step to the target

    def prefill_tokens(self, num_decode_rows: int, context: int) -> int:
        """Prompt tokens of the next step, behind `context` others of their prompt.

        Never none, if there is room: prompts come through in any case.
        """
        room = self._max_tokens - num_decode_rows
        if self._target_seconds is None or num_decode_rows == 0:
            return room
        # tokens * (1 + cost * (context + tokens / 2)) = work
        cost = self._key_cost.value
        each = 1.0 + cost * context
        tokens = 2.0 * self._work / (each + math.sqrt(each * each + 2.0 * cost * self._work))
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
            self._correct(num_prefill_tokens, num_keys, taken, AIM * self._target_seconds)
            before = self._key_cost.value
            self._key_cost.observe(num_prefill_tokens, num_keys, taken)
            keys = num_keys / num_prefill_tokens  # a step like this one keeps its number of tokens
            self._work *= (1.0 + self._key_cost.value * keys) / (1.0 + before * keys)

    def _correct(self, num_tokens: int, num_keys: float, taken: float, aim_seconds: float) -> None:
        if num_tokens == MIN_CHUNK:
            self._few_seconds = taken
        left = aim_seconds - self._decode_seconds
        if self._few_seconds > left:
            left = 2.0 * self._few_seconds
        change = min(max(left / taken, 1.0 / MAX_CHANGE), MAX_CHANGE) if taken else MAX_CHANGE
        work = change * (num_tokens + self._key_cost.value * num_keys)
        # The end of a prompt is a small chunk, which says nothing against a large one.
        self._work = max(work, self._work) if change >= 1.0 else max(min(work, self._work), MIN_CHUNK)


class KeyCost:
    """Seconds per token = a * (1 + value * keys per token): least squares over steps, the newest first.

    It stays what it was while the contexts of those steps are too much alike to tell (standard deviation to
    mean below LEAST_SPREAD), and small chunks, which mostly take what a step takes once, do not count.
    """

    MEMORY = 0.9  # how much less each step counts than the one after it
    LEAST_SPREAD = 0.1
    LEAST_TOKENS = 64
    LEAST_SHARE = 0.2  # of the time is for tokens themselves, in any case

    def __init__(self) -> None:
        self.value = KEY_COST
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums

    def observe(self, num_tokens: int, num_keys: float, seconds: float) -> None:
        """Take in a step."""
        if num_tokens < self.LEAST_TOKENS:
            return
        x, y = num_keys / num_tokens, seconds / num_tokens
        self._weight = self._weight * self.MEMORY + 1.0
        self._x = self._x * self.MEMORY + x
        self._y = self._y * self.MEMORY + y
        self._xx = self._xx * self.MEMORY + x * x
        self._xy = self._xy * self.MEMORY + x * y
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > (self.LEAST_SPREAD * mean_x) ** 2 and mean_y > 0.0:
            slope = max((self._xy / self._weight - mean_x * mean_y) / variance, 0.0)
            self.value = slope / max(mean_y - slope * mean_x, self.LEAST_SHARE * mean_y)
