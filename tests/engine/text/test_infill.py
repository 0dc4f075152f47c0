"""Tokens for filling in the middle are found by name."""

import pytest
from tokenizers import AddedToken, Tokenizer, models

from engine.text.infill import FORMATS, InfillTokens


@pytest.mark.parametrize("texts", FORMATS)
def test_every_family_is_known(texts):
    backend = Tokenizer(models.BPE())
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", *texts)])
    found = InfillTokens.of(backend)
    assert found == (1, 2, 3)
    assert found.prompt([0], [7, 8], [9]) == [0, 1, 7, 8, 2, 9, 3]


def test_tokenizers_without_infill_tokens_have_none():
    backend = Tokenizer(models.BPE())
    backend.add_special_tokens([AddedToken("<fim_prefix>", special=True)])
    assert InfillTokens.of(backend) is None
