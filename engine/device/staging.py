"""Numbers on their way from the host to the device."""

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

    To a GPU they travel in one copy that nobody waits for: a copy from ordinary memory would hold the host
    until the device has reached it, and with that the launch of the step behind it. The pinned memory is
    torch's own and is reused only once the copy has been carried out.
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


def _as(part: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    """An array that lies in int64 words on the device, in few calls: each may have to win the GIL back."""
    if array.dtype != np.int64:
        part = part.view(DTYPES[array.dtype])[: array.size]
    return part if array.ndim == 1 else part.view(array.shape)
