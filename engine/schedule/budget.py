"""How many prompt tokens may a step compute beside its decode rows?

All that the token budget leaves, or, if the step is to take no longer than a target, as many as were found to
fit into that time. Whoever decodes waits for every step as a whole, so the target bounds the time between two
tokens of a stream, and what is left of it goes to prompts.
"""

FIRST_CHUNK = 64
MIN_CHUNK = 16
SMOOTHING = 0.5
# How much less each step counts than the one after it, and how unequal chunks must be (standard deviation to
# mean) before they tell what a step costs once from what each token costs.
MEMORY = 0.6
LEAST_SPREAD = 0.1


class StepBudget:
    """Learns from the steps that were computed what prompt tokens cost.

    A step takes the time of its decode rows, known from the steps without prompt tokens, plus, for prompt
    tokens, a time once and a time for each, known from the others. The latter grows with the context; but a
    step much like the last one takes much the same time, so the chunks that are planned come to where a step
    takes what it should. They at most double from one step to the next. Where even a step with few prompt
    tokens takes too long, few do not help: as many are taken as cost what the step costs anyway.
    """

    def __init__(self, max_tokens: int, target_seconds: float | None) -> None:
        self._max_tokens = max_tokens
        self._target_seconds = target_seconds
        self._decode_seconds = 0.0
        self._cost = _Line()
        self._last_chunk = FIRST_CHUNK // 2

    def prefill_tokens(self, num_decode_rows: int) -> int:
        """Prompt tokens of the next step. Never none, if there is room: prompts come through in any case."""
        room = self._max_tokens - num_decode_rows
        if self._target_seconds is None or num_decode_rows == 0:
            return room
        wanted = 2 * self._last_chunk
        if self._cost.slope > 0.0:
            once = self._cost.base
            left = self._target_seconds - self._decode_seconds - once
            wanted = min(wanted, int((left if left > 0.0 else once) / self._cost.slope))
        return min(room, max(wanted, MIN_CHUNK))

    def observe(self, num_decode_rows: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step of so many rows and tokens took `seconds` on the device."""
        if num_prefill_tokens == 0:
            old = self._decode_seconds
            self._decode_seconds = old + SMOOTHING * (seconds - old) if old else seconds
        elif num_prefill_tokens >= MIN_CHUNK:
            extra = seconds - (self._decode_seconds if num_decode_rows else 0.0)
            self._cost.add(num_prefill_tokens, max(extra, 0.0))
            self._last_chunk = num_prefill_tokens


class _Line:
    """`base + slope * x` through recent points: least squares, weights that fall off, nothing negative.

    While the points stand too close together to tell the two apart, the base stays what it was.
    """

    def __init__(self) -> None:
        self.base = 0.0
        self.slope = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums

    def add(self, x: float, y: float) -> None:
        """Take in a point."""
        self._weight = self._weight * MEMORY + 1.0
        self._x = self._x * MEMORY + x
        self._y = self._y * MEMORY + y
        self._xx = self._xx * MEMORY + x * x
        self._xy = self._xy * MEMORY + x * y
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > (LEAST_SPREAD * mean_x) ** 2:
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            self.base = min(max(mean_y - slope * mean_x, 0.0), mean_y)
        self.slope = max(mean_y - self.base, 0.0) / mean_x
