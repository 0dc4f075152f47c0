import numpy as np
import torch

from kernels.philox import uniform
from tests.kernels.conftest import Target


def philox_word(counter: int, key: int) -> int:
    """First output word of Philox-4x32-10, in Python integers."""
    c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (p1 >> 32) ^ c[1] ^ k[0],
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c[3] ^ k[1],
            p0 & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def test_the_reference_gives_the_published_answer():
    assert philox_word(0, 0) == 0x6627E8D5


def test_numbers_equal_the_reference_bit_for_bit(target: Target):
    generator = np.random.default_rng(0)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), *generator.integers(-(2**63), 2**63 - 1, 59).tolist()]
    positions = [0, 1, 2**31, 2**32 + 5, 2**40, *generator.integers(0, 2**20, 59).tolist()]
    result = uniform(*target.to(torch.tensor(seeds), torch.tensor(positions)))
    expected = [
        (philox_word(position, seed % 2**64) >> 8) * 2.0**-24
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert result.dtype == torch.float32
    assert result.tolist() == expected


def test_the_numbers_are_uniform_over_positions(target: Target):
    n = 4096
    numbers = uniform(*target.to(torch.full((n,), 7), torch.arange(n))).cpu().double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=16, min=0, max=1)
    chi_square = ((counts - n / 16) ** 2 / (n / 16)).sum().item()
    assert chi_square < 37.7, f"chi-square {chi_square:.1f} of 15 degrees of freedom (p = 0.001)"
