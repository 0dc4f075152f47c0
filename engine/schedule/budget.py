"""How many prompt tokens may a step compute beside its decode rows?

All that the token budget leaves, or, if the step is to take no longer than a target, as many as were found to
fit into that time. Whoever decodes waits for every step as a whole, so the target bounds the time between two
tokens of a stream, and what is left of it goes to prompts.
"""

MIN_CHUNK = 16
SMOOTHING = 0.5
# Steps are planned for a little less than the target: they vary, and each is longer than the one before it,
# since a prompt's later tokens attend to more.
AIM = 0.95
# No chunk is more than so many times smaller or larger than the last, whatever that took.
MAX_CHANGE = 4.0


class StepBudget:
    """Learns from the steps that were computed what prompt tokens cost.

    A step takes the time of its decode rows, known from the steps without prompt tokens, and its prompt
    tokens take the rest: a time once and a time for each. If all of it were for each, a chunk that took x
    times what is left of the target should be x times smaller. What is spent once makes such a correction too
    small, never too large; so chunks come to where a step takes what it should, and do not swing around it.

    Where even MIN_CHUNK prompt tokens take too long, few do not help: as many more are taken as cost what the
    few cost anyway.
    """

    def __init__(self, max_tokens: int, target_seconds: float | None) -> None:
        self._max_tokens = max_tokens
        self._target_seconds = target_seconds
        self._decode_seconds = 0.0
        self._few_seconds = 0.0  # what MIN_CHUNK prompt tokens take
        self._fitting_chunk = float(MIN_CHUNK)  # what takes a step to the target

    def prefill_tokens(self, num_decode_rows: int) -> int:
        """Prompt tokens of the next step. Never none, if there is room: prompts come through in any case."""
        room = self._max_tokens - num_decode_rows
        if self._target_seconds is None or num_decode_rows == 0:
            return room
        return min(room, max(round(self._fitting_chunk), MIN_CHUNK))

    def observe(self, num_decode_rows: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step of so many rows and tokens took `seconds` on the device."""
        if num_prefill_tokens == 0:
            old = self._decode_seconds
            self._decode_seconds = old + SMOOTHING * (seconds - old) if old else seconds
        elif num_prefill_tokens >= MIN_CHUNK and self._target_seconds is not None:
            self._learn(num_prefill_tokens, seconds, self._target_seconds, num_decode_rows > 0)

    def _learn(self, num_tokens: int, seconds: float, target_seconds: float, has_decode_rows: bool) -> None:
        taken = max(seconds - self._decode_seconds, 0.0) if has_decode_rows else seconds
        if num_tokens == MIN_CHUNK:
            self._few_seconds = taken
        left = AIM * target_seconds - self._decode_seconds
        if self._few_seconds > left:
            left = 2.0 * self._few_seconds
        change = min(max(left / taken, 1.0 / MAX_CHANGE), MAX_CHANGE) if taken else MAX_CHANGE
        # The end of a prompt is a small chunk, which says nothing against a large one.
        choose = max if change >= 1.0 else min
        self._fitting_chunk = min(
            max(choose(change * num_tokens, self._fitting_chunk), MIN_CHUNK), self._max_tokens
        )
