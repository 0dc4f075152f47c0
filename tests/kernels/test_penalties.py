import pytest
import torch

from kernels.penalties import apply_penalties
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close


def exact(logits, counts, prompt_mask, slots, presence, frequency, repetition):
    """Token by token in Python floats."""
    out = logits.double().clone()
    for row in range(logits.shape[0]):
        slot = int(slots[row])
        for token in range(logits.shape[1]):
            x, count = float(logits[row, token]), int(counts[slot, token])
            if count or prompt_mask[slot, token]:
                x = x / float(repetition[row]) if x > 0 else x * float(repetition[row])
            out[row, token] = x - float(frequency[row]) * count - float(presence[row]) * (count > 0)
    return out


@pytest.mark.parametrize("vocab", [1, 100, 2049])
def test_mixed_rows(target: Target, vocab: int):
    num_rows, num_slots = 5, 8
    logits = 3 * torch.randn(num_rows, vocab)
    counts = torch.randint(-3, 4, (num_slots, vocab)).clamp(min=0).to(torch.int32)
    prompt_mask = torch.rand(num_slots, vocab) < 0.3
    slots = torch.tensor([6, 0, 3, 3, 7])
    presence = torch.tensor([0.0, 1.5, 0.0, -2.0, 0.5])
    frequency = torch.tensor([0.0, 0.0, 0.7, -0.3, 0.2])
    repetition = torch.tensor([1.0, 1.0, 1.0, 1.3, 0.8])
    args = (logits, counts, prompt_mask, slots, presence, frequency, repetition)
    expected = exact(*args)
    result = logits.clone().to(target.device)
    apply_penalties(result, *target.to(*args[1:]))
    assert torch.equal(result[0].cpu(), logits[0]), "a row without penalties is left alone"
    assert_close(result, expected, torch.float32)


def test_batch_without_penalties(target: Target):
    logits = torch.randn(2, 50, device=target.device)
    before = logits.clone()
    counts = torch.ones(2, 50, dtype=torch.int32)
    off = torch.zeros(2)
    apply_penalties(logits, *target.to(counts, counts.bool(), torch.tensor([0, 1]), off, off, torch.ones(2)))
    assert torch.equal(logits, before)
