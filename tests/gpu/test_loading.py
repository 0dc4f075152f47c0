"""Weights read to the GPU through pinned buffers."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.safetensors_file import read_header
from models.tensor_reader import PIECE_BYTES, read_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("large")]


@pytest.mark.parametrize("inference", [True, False])
def test_tensors_around_the_size_of_the_buffers(inference, device, tmp_path):
    """Several threads; sizes of no, one and several buffers, with one byte more and less.

    The engine loads in inference mode, which threads do not inherit.
    """
    torch.manual_seed(0)
    sizes = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7] * 3
    tensors = {
        str(index): torch.randint(0, 256, (size,), dtype=torch.uint8) for index, size in enumerate(sizes)
    }
    tensors["matrix"] = torch.randn(3001, 4099, dtype=torch.bfloat16)
    tensors["scalar"] = torch.tensor(3.0)
    save_file(tensors, tmp_path / "some.safetensors")
    header = read_header(tmp_path / "some.safetensors")
    expected = load_file(tmp_path / "some.safetensors")
    with torch.inference_mode(inference):
        found = zip(header, read_tensors(header.values(), device), strict=True)
        for name, tensor in found:
            assert tensor.is_cuda
            assert torch.equal(tensor.cpu(), expected[name]), name
