"""Numbers on their way from the host to the device."""

from collections.abc import Sequence

import numpy as np
import torch


def upload(device: torch.device, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return int64 and float64 arrays as tensors of the same shapes on `device`.

    To a GPU they travel in one copy that nobody waits for: a copy from ordinary memory would hold the host
    until the device has reached it, and with that the launch of the step behind it. The pinned memory is
    torch's own and is reused only once the copy has been carried out.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [array.size for array in arrays]
    pinned = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    for part, array in zip(pinned.split(sizes), arrays, strict=True):
        part.numpy()[:] = array.reshape(-1).view(np.int64)
    parts = pinned.to(device, non_blocking=True).split(sizes)
    return [
        (part if array.dtype == np.int64 else part.view(torch.float64)).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]
