"""Predicts the length of an output from the lengths of recent outputs."""

import numpy as np

WINDOW = 1024
MIN_AHEAD = 16
EPSILON = 1e-9
# Typical lengths of a chat assistant's answers, used before outputs have been seen. They leave the window
# like observed lengths.
PRIOR = (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536)


class OutputLengths:
    """Estimates the survival function of output lengths: the share of outputs longer than n tokens.

    An output that was cut off (at its length limit, by an abort, by a fault) would have become longer. The
    estimator of Kaplan and Meier ("Nonparametric Estimation from Incomplete Observations", 1958) counts it up
    to its cut only, so that many answers cut at 16 tokens do not make all predictions short.
    """

    def __init__(self) -> None:
        self._window = np.zeros(WINDOW, np.int64)
        self._is_complete = np.zeros(WINDOW, np.bool_)
        self._num_seen = 0
        self._num_new = 0
        self._lengths = np.empty(0, np.int64)
        self._survival = np.empty(0)
        for length in PRIOR:
            self.observe(length, is_complete=True)

    def observe(self, num_tokens: int, *, is_complete: bool) -> None:
        """Add an output of `num_tokens` tokens; not `is_complete`: it was cut off there."""
        index = self._num_seen % WINDOW
        self._window[index] = num_tokens
        self._is_complete[index] = is_complete
        self._num_seen += 1
        self._num_new += 1

    def guess(self, num_produced: int, quantile: float) -> int:
        """Return the length within which an output ends with probability `quantile`.

        `num_produced`: its tokens so far. The result is at least `num_produced` + MIN_AHEAD. Where the
        estimate does not reach `quantile`, it is twice `num_produced` or twice the longest length seen.
        """
        # Estimating takes 0.1 ms, and fewer new lengths than one in 64 change little.
        if self._num_new * 64 > min(self._num_seen, WINDOW):
            self._estimate()
        # Survival falls at each of `_lengths`; at num_produced tokens it is `alive`.
        index = int(self._lengths.searchsorted(num_produced, side="right"))
        alive = self._survival[index - 1] if index else 1.0
        found = index + int((-self._survival[index:]).searchsorted(-alive * (1.0 - quantile) - EPSILON))
        if alive > 0.0 and found < len(self._lengths):
            length = int(self._lengths[found])
        else:
            length = 2 * max(num_produced, int(self._lengths[-1]))
        return max(length, num_produced + MIN_AHEAD)

    def _estimate(self) -> None:
        num_known = min(self._num_seen, WINDOW)
        window = self._window[:num_known]
        self._lengths, indices, counts = np.unique(window, return_inverse=True, return_counts=True)
        num_ended = np.bincount(indices[self._is_complete[:num_known]], minlength=len(self._lengths))
        num_at_least = counts[::-1].cumsum()[::-1]
        self._survival = np.cumprod(1.0 - num_ended / num_at_least)
        self._num_new = 0
