"""The sampler against a plain float64 reference: which tokens it keeps, and how it draws among them.

Covers kernels/row_search.py.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.philox import uniform
from kernels.sampling import sample
from tests.kernels.conftest import Target
from tests.kernels.sampling_reference import draw, kept_tokens

# The fixture is only read, so examples may share it.
property_test = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def many_rows_only(target: Target) -> None:
    if target.backend == "triton" and not target.large:
        pytest.skip("the interpreter takes 0.3 s a row; the mixed batches below compare it draw by draw")


def run(target: Target, logits, temperature, top_k, top_p, min_p, seed, position) -> torch.Tensor:
    """Call `sample`; scalars are spread over the rows."""
    num_rows = logits.shape[0]

    def rows(value, dtype):
        value = torch.as_tensor(value, dtype=dtype)
        return value.expand(num_rows).clone().to(target.device)

    return sample(
        logits.to(target.device),
        torch.arange(num_rows, device=target.device),
        rows(temperature, torch.float32),
        rows(top_k, torch.int32),
        rows(top_p, torch.float32),
        rows(min_p, torch.float32),
        rows(seed, torch.int64),
        rows(position, torch.int64),
    ).cpu()


@st.composite
def rows_of_logits(draw_value):
    """Logits with ties and without, flat and peaked, and a setting of every filter."""
    vocab = draw_value(st.sampled_from([1, 2, 50, 300, 700]))
    generator = np.random.default_rng(draw_value(st.integers(0, 2**32 - 1)))
    logits = generator.normal(size=vocab) * draw_value(st.sampled_from([0.0, 0.3, 2.0, 10.0]))
    if draw_value(st.booleans()):
        logits = np.round(logits)
    return (
        logits.astype(np.float32),
        draw_value(st.sampled_from([0.3, 1.0, 1.7])),
        draw_value(st.sampled_from([0, 1, 2, 40, 299, 300, 5000])),
        draw_value(st.sampled_from([1.0, 0.95, 0.5, 0.01])),
        draw_value(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
    )


def is_borderline(logits, temperature, top_k, top_p, min_p) -> bool:
    """Whether rounding in fp32 may move the border of what is kept."""
    kept, _ = kept_tokens(logits, temperature, top_k, top_p, min_p)
    nudged = [
        kept_tokens(logits, temperature, top_k, top_p * f if top_p < 1 else top_p, min_p * f)[0]
        for f in (1 - 1e-5, 1 + 1e-5)
    ]
    return any((other != kept).any() for other in nudged)


@given(case=rows_of_logits(), position=st.integers(0, 2**40))
@property_test
def test_token_is_the_one_the_reference_draws(target: Target, case, position):
    many_rows_only(target)
    logits, temperature, top_k, top_p, min_p = case
    positions = torch.arange(8) + position
    result = run(
        target, torch.from_numpy(logits).expand(8, -1).clone(), temperature, top_k, top_p, min_p, 3, positions
    )
    if is_borderline(*case):
        return
    kept, weights = kept_tokens(*case)
    numbers = uniform(torch.full((8,), 3).to(target.device), positions.to(target.device)).tolist()
    for token, u in zip(result.tolist(), numbers, strict=True):
        assert kept[token], f"token {token} is filtered out"
        near = {draw(kept, weights, min(max(u + d, 0.0), 1 - 2**-24)) for d in (-1e-5, 0.0, 1e-5)}
        assert token in near, f"drew {token}, the reference {near} (u = {u})"


def test_equals_of_the_kth_token_count_towards_top_p(target: Target):
    """They are kept by top-k, so top-p is a share of a total that includes them, however many they are."""
    logits = torch.cat((torch.full((10,), 2.0), torch.zeros(500)))
    case = (logits.numpy(), 1.0, 11, 0.5, 0.0)
    kept, _ = kept_tokens(*case)
    assert kept.all(), "the ten likeliest have a sixth of the total"
    result = run(target, logits.expand(64, -1).clone(), *case[1:], 3, torch.arange(64))
    assert (result >= 10).any(), "the ten likeliest alone were drawn"


@given(case=rows_of_logits())
@property_test
def test_exactly_the_kept_tokens_can_be_drawn(target: Target, case):
    """Among few kept tokens of similar weight, many draws find each of them and no other."""
    many_rows_only(target)
    logits, _, top_k, top_p, min_p = case
    temperature = 20.0
    if is_borderline(logits, temperature, top_k, top_p, min_p):
        return
    kept, weights = kept_tokens(logits, temperature, top_k, top_p, min_p)
    draws = 512
    if kept.sum() * 12 > draws * (weights[kept].min() / weights.max()):
        return
    result = run(
        target,
        torch.from_numpy(logits).expand(draws, -1).clone(),
        temperature,
        top_k,
        top_p,
        min_p,
        11,
        torch.arange(draws),
    )
    assert set(result.tolist()) == set(np.flatnonzero(kept).tolist())


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (7, 0.8, 0.05)]
)
def test_draws_follow_the_distribution(target: Target, top_k, top_p, min_p):
    many_rows_only(target)
    draws = 20_000
    logits = torch.randn(40) * 2
    kept, weights = kept_tokens(logits.numpy(), 0.9, top_k, top_p, min_p)
    result = run(target, logits.expand(draws, -1).clone(), 0.9, top_k, top_p, min_p, 5, torch.arange(draws))
    expected = np.where(kept, weights, 0)
    expected = expected / expected.sum() * draws
    counts = np.bincount(result.numpy(), minlength=40)
    assert counts[~kept].sum() == 0
    # Bins with few expected draws are joined, as the chi-square approximation asks for.
    order = np.argsort(expected)
    order = order[kept[order]]
    bins = np.cumsum(expected[order]) // 8
    observed = np.bincount(bins.astype(int), weights=counts[order])
    wanted = np.bincount(bins.astype(int), weights=expected[order])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    # Wilson and Hilferty's approximation of the 0.9999 quantile.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi_square < bound, f"chi-square {chi_square:.1f}, bound {bound:.1f} of {freedom} degrees"


def mixed_batch(vocab: int):
    """Rows of every kind side by side: greedy, unfiltered, each filter, all of them, flat and tied."""
    logits = torch.randn(12, vocab) * 3
    logits[7] = 0.0
    logits[8] = logits[8].round()
    return (
        logits,
        torch.tensor([0.0, 1.0, 0.7, 1.0, 1.0, 1.3, 1e-6, 1.0, 1.0, 2.0, 1.0, 5.0]),
        torch.tensor([0, 0, 50, 0, 0, 20, 5, 0, 10, 2000, 0, 1500], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 0.8, 0.5, 0.5, 1.0, 0.9, 0.9999, 0.99]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        torch.arange(12) * 7919,
        torch.arange(12) + 100,
    )


@pytest.mark.parametrize("vocab", [33, 5000])
def test_a_row_alone_equals_the_row_in_a_batch(target: Target, vocab: int):
    batch = mixed_batch(vocab)
    together = run(target, *batch)
    for row in range(0, 12, 3 if target.backend == "triton" and not target.large else 1):
        alone = run(target, *(t[row : row + 1] for t in batch))
        assert alone.item() == together[row].item(), f"row {row} depends on its neighbours"


def test_large_vocabulary_equals_the_reference(target: Target):
    batch = mixed_batch(128_256 if target.large else 9_001)
    result = run(target, *batch)
    numbers = uniform(*target.to(*batch[5:])).tolist()
    for row in range(12):
        logits, temperature, top_k, top_p, min_p = (
            batch[0][row].numpy(),
            *(t[row].item() for t in batch[1:5]),
        )
        if temperature < 1e-5:
            assert result[row] == logits.argmax()
            continue
        kept, weights = kept_tokens(logits, temperature, top_k, top_p, min_p)
        u = numbers[row]
        low, high = (draw(kept, weights, min(max(u + d, 0.0), 1 - 2**-24)) for d in (-1e-5, 1e-5))
        assert low <= result[row] <= high, f"row {row}: {result[row]} is not in [{low}, {high}]"


def test_greedy_takes_the_lowest_id_among_equals(target: Target):
    logits = torch.zeros(2, 3000)
    logits[1, [17, 2500]] = 1.0
    assert run(target, logits, 0.0, 0, 1.0, 0.0, 0, 0).tolist() == [0, 17]


def test_infinitely_unlikely_tokens_are_never_drawn(target: Target):
    """Masks and biases put -inf into logits."""
    logits = torch.full((12, 200), -torch.inf)
    logits[:, [3, 150]] = 1.0
    top_k = torch.tensor([0, 10, 0, 10] * 3)
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.9] * 3)
    result = run(target, logits, 1.0, top_k, top_p, 0.0, 1, torch.arange(12))
    assert set(result.tolist()) == {3, 150}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_without_a_finite_maximum_gets_no_token_and_harms_no_other(target: Target):
    logits, *parameters = mixed_batch(300)
    expected = run(target, logits, *parameters)
    broken = logits.clone()
    broken[[0, 2, 3, 10]] = torch.nan
    broken[1, 7] = torch.nan
    broken[4] = -torch.inf
    broken[8, 299] = torch.inf
    result = run(target, broken, *parameters)
    assert result[[0, 1, 2, 3, 4, 8, 10]].tolist() == [-1] * 7
    intact = [5, 6, 7, 9, 11]
    assert torch.equal(result[intact], expected[intact])
    greedy = run(target, broken, 0.0, 0, 1.0, 0.0, 1, torch.arange(12))
    assert greedy[[0, 1, 2, 3, 4, 8, 10]].tolist() == [-1] * 7
    assert torch.equal(greedy[intact], logits[intact].argmax(-1))


def test_rows_read_the_parameters_of_their_slots(target: Target):
    logits, *parameters, position = mixed_batch(300)
    num_rows = logits.shape[0]
    expected = run(target, logits, *parameters, position)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(3))
    by_slot = []
    for value, dtype in zip(parameters, (*[torch.float32] * 4, torch.int64), strict=True):
        column = torch.empty(num_rows, dtype=dtype)
        column[order] = torch.as_tensor(value, dtype=dtype).expand(num_rows)
        by_slot.append(column)
    by_slot[1] = by_slot[1].to(torch.int32)
    result = sample(*target.to(logits, order, *by_slot, torch.as_tensor(position, dtype=torch.int64)))
    assert torch.equal(result.cpu(), expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of NaN
def test_the_most_likely_token_of_long_rows(target: Target):
    """Ties, masked tokens and rows without a finite maximum, in rows of several blocks."""
    nan, inf = float("nan"), float("inf")
    logits = torch.randn(9, 2500)[:, :2499]
    logits[1, [700, 2300]] = 9.0
    logits[2] = -inf
    logits[3, 1500] = nan
    logits[4, 1500] = -torch.tensor(nan)
    logits[5, 2000] = inf
    logits[6, :] = -inf
    logits[6, 2498] = -1e30
    logits[7] = -logits[7].abs() - 1
    logits[8] = -logits[8].abs()
    logits[8, 1200], logits[8, 1300] = -0.0, 0.0
    expected = logits.argmax(-1)
    expected[2:6] = -1
    assert run(target, logits, 0.0, 0, 1.0, 0.0, 1, 1).tolist() == expected.tolist()
    assert (expected[1], expected[8]) == (700, 1200)
