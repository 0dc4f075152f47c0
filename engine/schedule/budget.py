"""How many prompt tokens may a step compute beside its decode rows?

All that the token budget leaves, or, if the step is to take no longer than a target, as many as were found to
fit into that time. Whoever decodes waits for every step as a whole, so the target bounds the time between two
tokens of a stream, and what is left of it goes to prompts.
"""

FIRST_CHUNK = 64
MIN_CHUNK = 16
SMOOTHING = 0.5


class StepBudget:
    """Learns from the steps that were computed what one more prompt token costs.

    A step takes the time of its decode rows, known from the steps without prompt tokens, plus a time for
    each prompt token, known from the others. That time includes what a mixed step costs once, and it grows
    with the context; but a step much like the last one takes much the same time, so the chunks that are
    planned come to where a step takes what it should. They at most double from one step to the next.
    """

    def __init__(self, max_tokens: int, target_seconds: float | None) -> None:
        self._max_tokens = max_tokens
        self._target_seconds = target_seconds
        self._decode_seconds = 0.0
        self._seconds_per_token = 0.0
        self._last_chunk = FIRST_CHUNK // 2

    def prefill_tokens(self, num_decode_rows: int) -> int:
        """Prompt tokens of the next step. Never none, if there is room: prompts come through in any case."""
        room = self._max_tokens - num_decode_rows
        if self._target_seconds is None or num_decode_rows == 0:
            return room
        wanted = 2 * self._last_chunk
        if self._seconds_per_token > 0.0:
            left = self._target_seconds - self._decode_seconds
            wanted = min(wanted, int(left / self._seconds_per_token))
        return min(room, max(wanted, MIN_CHUNK))

    def observe(self, num_decode_rows: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step of so many rows and tokens took `seconds` on the device."""
        if num_prefill_tokens == 0:
            self._decode_seconds = _smooth(self._decode_seconds, seconds)
        elif num_prefill_tokens >= MIN_CHUNK:
            extra = seconds - (self._decode_seconds if num_decode_rows else 0.0)
            per_token = max(extra, 0.0) / num_prefill_tokens
            self._seconds_per_token = _smooth(self._seconds_per_token, per_token)
            self._last_chunk = num_prefill_tokens


def _smooth(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old) if old else new
