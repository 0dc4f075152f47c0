"""Uploads several host arrays in one non-blocking copy; copies results back to pinned memory."""

from collections.abc import Sequence

import numpy as np
import torch

DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def upload(device: torch.device, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return arrays of the DTYPES as tensors of the same shapes on `device`.

    To a GPU they travel in one copy without waiting: a copy from pageable memory would block the host until
    the device has reached it, and with that the launch of the next step. The pinned memory is torch's own and
    is reused only after the copy.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // 8) for array in arrays]  # each begins where any dtype may
    pinned = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    words, start = pinned.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        words[start : start + size].view(array.dtype)[: array.size] = array.reshape(-1)
        start += size
    parts = pinned.to(device, non_blocking=True).split(sizes)
    return [_as(part, array) for part, array in zip(parts, arrays, strict=True)]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, valid once the device's stream has reached it; on a CPU the tensor."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _as(part: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    """An array that lies in int64 words on the device, in few calls: each may have to win the GIL back."""
    if array.dtype != np.int64:
        part = part.view(DTYPES[array.dtype])[: array.size]
    return part if array.ndim == 1 else part.view(array.shape)
