"""Rows of token masks, as constraints write them."""

import numpy as np

WORD_BITS = 32


def mask_of(token_ids: np.ndarray, num_words: int) -> np.ndarray:
    """int32 [num_words]: bit `t % 32` of word `t // 32` is set for each token t of `token_ids` int64 [n].

    Tokens beyond the mask have no logit, and are left out.
    """
    bits = np.zeros(num_words * WORD_BITS, np.uint8)
    bits[token_ids[token_ids < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
