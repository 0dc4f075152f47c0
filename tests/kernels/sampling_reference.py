"""What the sampler must do, one row at a time, in plain float64 numpy."""

import numpy as np


def kept_tokens(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (kept [vocab] bool, weights [vocab] relative to the most likely token)."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    kept = np.ones(len(logits), dtype=bool)
    descending = np.sort(logits)[::-1]
    if top_k > 0:
        kept &= logits >= descending[min(top_k, len(logits)) - 1]
    if top_p < 1:
        target = top_p * weights[kept].sum()
        values, value_of = np.unique(logits, return_inverse=True)
        down_to = np.bincount(value_of, weights)[::-1].cumsum()  # [values]: of all tokens at least as likely
        kept &= logits >= values[::-1][np.searchsorted(down_to, target)]
    return kept & (weights >= min_p), weights


def draw(kept: np.ndarray, weights: np.ndarray, u: float) -> int:
    """Return the first id whose cumulative weight over the kept tokens exceeds u times their total."""
    cumulative = np.where(kept, weights, 0.0).cumsum()
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
