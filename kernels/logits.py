"""fp32 logits from the output head's product: scaled, and soft-capped (Gemma 2, Gemma Team, 2024)."""

import torch

from kernels.dispatch import dispatch, tl, triton

_BLOCK = 2048


@triton.jit
def _scaled_logits_kernel(
    x_ptr,
    out_ptr,
    in_stride,
    out_stride,
    vocab_size,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    x = tl.load(x_ptr + row * in_stride + columns, mask=inside, other=0.0).to(tl.float32) * scale
    if SOFTCAP:
        # tanh(y) is 2 * sigmoid(2 * y) - 1.
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    tl.store(out_ptr + row * out_stride + columns, x, mask=inside)


def scaled_logits_triton(x: torch.Tensor, scale: float, softcap: float, out: torch.Tensor) -> torch.Tensor:
    num_rows, vocab_size = x.shape
    assert x.stride(1) == 1 and out.stride(1) == 1 and out.shape == x.shape
    if num_rows:
        _scaled_logits_kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
            x, out, x.stride(0), out.stride(0), vocab_size, scale, softcap, SOFTCAP=softcap > 0, BLOCK=_BLOCK
        )
    return out


def scaled_logits_torch(x: torch.Tensor, scale: float, softcap: float, out: torch.Tensor) -> torch.Tensor:
    """Write `softcap * tanh(x * scale / softcap)`, or `x * scale` if softcap is 0, to `out` and return it.

    x [num_rows, vocab_size] of any dtype, out fp32 of the same shape; they may be the same tensor.
    """
    out.copy_(x).mul_(scale)
    return out.div_(softcap).tanh_().mul_(softcap) if softcap else out


scaled_logits = dispatch(scaled_logits_triton, scaled_logits_torch)
