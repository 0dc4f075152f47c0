"""Counter-based random numbers: Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011)."""

import torch

from kernels.dispatch import dispatch, tl, triton

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


@triton.jit
def philox_uniform(seed, position):
    """Return `uniform` of one row or of a block of rows, int64 each, inside another kernel."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(seed, low, high, zero, zero)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24


@triton.jit(do_not_specialize=["num_rows"])
def _uniform_kernel(seed_ptr, position_ptr, out_ptr, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    seed = tl.load(seed_ptr + rows, mask=inside, other=0)
    position = tl.load(position_ptr + rows, mask=inside, other=0)
    tl.store(out_ptr + rows, philox_uniform(seed, position), mask=inside)


def uniform_triton(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    out = torch.empty(seed.shape, dtype=torch.float32, device=seed.device)
    if seed.numel():
        _uniform_kernel[(triton.cdiv(seed.numel(), 128),)](seed, position, out, seed.numel(), BLOCK=128)
    return out


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


uniform = dispatch(uniform_triton, uniform_torch)
