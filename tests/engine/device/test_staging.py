import numpy as np
import pytest
import torch

from engine.device.staging import DTYPES, upload


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_arrive_in_their_shapes_whatever_stands_beside_them(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    numbers = np.random.default_rng(0)
    arrays = [
        numbers.integers(-(2**31), 2**31, shape).astype(dtype)
        for shape in [(3,), (0,), (7, 1), (5, 3), (2, 0), (1,)]
        for dtype in DTYPES
    ]
    for array, tensor in zip(arrays, upload(torch.device(device), arrays), strict=True):
        assert (tensor.device.type, tensor.dtype) == (device, DTYPES[array.dtype])
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
