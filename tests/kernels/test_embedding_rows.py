import torch

from kernels.embedding_rows import embedding_rows
from tests.kernels.conftest import Target


def test_rows_are_scaled(target: Target):
    values, scale = torch.randint(-127, 128, (11, 33), dtype=torch.int8), torch.rand(11)
    indices = torch.tensor([3, 0, 10, 3])
    expected = torch.stack([values[index] * scale[index] for index in indices])
    found = embedding_rows(*target.to(scale, values, indices))
    assert torch.equal(found.cpu(), expected)
    assert embedding_rows(*target.to(scale, values, indices[:0])).shape == (0, 33)
