"""Counter-based random numbers: Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011)."""

import torch

from kernels.dispatch import dispatch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def uniform_torch(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return one uniform number in [0, 1) per row that depends on its seed and position alone.

    seed [num_rows] int64 is the 64-bit key, position [num_rows] int64 the low half of the 128-bit counter;
    returns [num_rows] fp32: the top 24 bits of the first output word, so every value is exact.
    """
    device = seed.device
    multipliers = torch.tensor(_MULTIPLIERS, device=device).unsqueeze(1)
    steps = torch.arange(_ROUNDS, device=device).view(-1, 1, 1) * torch.tensor(
        _KEY_STEPS, device=device
    ).unsqueeze(1)
    keys = (torch.stack((seed & _MASK, seed >> 32)) + steps) & _MASK  # [rounds, 2, num_rows]
    zero = torch.zeros_like(position)
    even = torch.stack((position & _MASK, zero))  # counter words 0 and 2
    odd = torch.stack(((position >> 32) & _MASK, zero))  # counter words 1 and 3
    for key in keys:
        # int64 products wrap, but their 64 bits are those of the unsigned product.
        product = (even * multipliers).flip(0)
        even, odd = ((product >> 32) & _MASK) ^ odd ^ key, product & _MASK
    return (even[0] >> 8).to(torch.float32) * 2.0**-24


uniform = dispatch(uniform_torch, uniform_torch)
