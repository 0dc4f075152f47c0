"""Each of the 256 values of fp8, read by its bits."""

import pytest
import torch

from kernels import fp8_values
from kernels.dispatch import tl, triton
from kernels.fp8_values import copy_widened, has_fp8, loadable, widened
from tests.kernels.conftest import Target

ALL = torch.arange(256, dtype=torch.uint8)


@triton.jit
def _widen_kernel(values_ptr, out_ptr):
    place = tl.arange(0, 256)
    tl.store(out_ptr + place, widened(tl.load(values_ptr + place), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bits_in_a_kernel(target: Target, dtype: torch.dtype):
    if target.backend == "torch":
        pytest.skip("has no kernel")
    out = torch.empty(256, dtype=dtype, device=target.device)
    _widen_kernel[(1,)](ALL.to(target.device), out)
    expected = ALL.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(out.cpu().float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_copies(dtype: torch.dtype):
    values = ALL.view(dtype).view(16, 16)[3:, :7]
    found = copy_widened(torch.empty(13, 7), values)
    torch.testing.assert_close(found, values.float(), rtol=0, atol=0, equal_nan=True)


def test_a_gpu_without_fp8_loads_bits(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (8, 6) if device.index else (8, 9)
    )
    has_fp8.cache_clear()
    try:
        devices = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
        assert [has_fp8(device) for device in devices] == [True, True, False]
    finally:
        has_fp8.cache_clear()
    values = ALL.view(torch.float8_e4m3fn)
    assert loadable(values) is values
    monkeypatch.setattr(fp8_values, "has_fp8", lambda _device: False)
    assert loadable(values).dtype == torch.uint8
    assert loadable(values.view(torch.int8)).dtype == torch.int8
