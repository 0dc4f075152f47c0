"""Scores of known tokens, by logits that are known, too."""

import pytest
import torch

from engine.device import scores
from engine.device.scores import Scores, score


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_a_rank_counts_all_tokens_that_are_as_likely(monkeypatch, rows_at_once: int) -> None:
    """Beyond the likeliest ones that are told, too."""
    vocab_size = 50
    monkeypatch.setattr(scores, "SLICE_BYTES", rows_at_once * 4 * vocab_size)
    logits = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(5))
    logits[5] = 0.0
    tokens = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    logits[1, 1] = 9.0
    logits[2, 2] = -9.0
    found = Scores(
        *map(torch.cat, zip(*score(lambda states: states, logits, tokens, vocab_size), strict=True))
    )
    order = logits.argsort(-1, descending=True).tolist()
    expected = [row.index(token) + 1 for row, token in zip(order, tokens.tolist(), strict=True)]
    expected[5] = vocab_size  # all are as likely
    assert found.ranks.tolist() == expected
    assert expected[1:3] == [1, vocab_size]
    torch.testing.assert_close(found.chosen, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
