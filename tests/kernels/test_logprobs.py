import pytest
import torch

from kernels.logprobs import top_logprobs
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close


@pytest.mark.parametrize("n", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab", [20, 333, 5000])
def test_against_log_softmax(target: Target, vocab: int, n: int):
    logits = 4 * torch.randn(4, vocab)
    logits[1] = logits[1].round()
    logits[2] = 0.25
    logits[3, 1:] -= 50
    chosen = torch.tensor([0, vocab - 1, vocab // 2, 0])
    exact = logits.double().log_softmax(-1)
    chosen_logprob, values, ids = (t.cpu() for t in top_logprobs(*target.to(logits, chosen), n))
    scale = logits.abs().max().item()
    assert_close(chosen_logprob, exact[torch.arange(4), chosen], torch.float32, vocab, scale)
    assert values.shape == ids.shape == (4, n)
    if n:
        assert_close(values, exact.topk(n, -1).values, torch.float32, vocab, scale)
        assert_close(values, exact.gather(1, ids), torch.float32, vocab, scale)
    for row in ids.tolist():
        assert len(set(row)) == n, f"a token stands twice in {row}"


def test_large_vocabulary(target: Target):
    logits = 3 * torch.randn(2, 128_256 if target.large else 20_000)
    logits[1] = 1.0
    exact = logits.double().log_softmax(-1)
    _, values, ids = top_logprobs(*target.to(logits, torch.tensor([5, 6])), 20)
    assert_close(values, exact.topk(20, -1).values, torch.float32, logits.shape[1], 20.0)
    assert len(set(ids[1].tolist())) == 20


def test_the_number_of_rows_changes_no_bit():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # which may share out the rows, or the logits of each
    try:
        logits, chosen = torch.randn(100, 49_152), torch.arange(100)
        together = top_logprobs(logits, chosen, 2)
        for row in range(len(chosen)):
            alone = top_logprobs(logits[row : row + 1], chosen[row : row + 1], 2)
            assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True)), row
    finally:
        torch.set_num_threads(threads)
