import pytest
import torch

from kernels.token_mask import apply_token_mask
from tests.kernels.conftest import Target


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 5000])
def test_only_forbidden_tokens_change(target: Target, vocab: int):
    logits = torch.randn(4, vocab)
    allowed = torch.rand(6, vocab) < 0.5
    bits = torch.zeros(6, -(-vocab // 32) * 32, dtype=torch.int64)
    bits[:, :vocab] = allowed
    words = (bits.view(6, -1, 32) << torch.arange(32)).sum(-1)
    masks = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    slots = torch.tensor([5, 0, 0, 3])
    result = logits.clone().to(target.device)
    apply_token_mask(result, *target.to(masks, slots))
    expected = torch.where(allowed[slots], logits, float("-inf"))
    assert torch.equal(result.cpu(), expected)
