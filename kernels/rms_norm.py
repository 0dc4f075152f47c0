"""RMSNorm, alone and fused with the residual addition before it (Zhang and Sennrich, 2019)."""

import torch

from kernels.cpu import rms_norm as cpu
from kernels.dispatch import dispatch, tl, triton


@triton.jit
def _normalised(x, weight, hidden, eps):
    value = x.to(tl.float32)
    normed = value * (1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / hidden + eps))
    if weight.dtype == x.dtype:
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    hidden,
    eps,
    ADD: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    NORM_X: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token, the whole row in registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        residual_row = residual_ptr + row * residual_stride + columns
        residual = tl.load(residual_row, mask=inside, other=0.0).to(tl.float32)
        if NORM_X:
            x = _normalised(x, tl.load(x_weight_ptr + columns, mask=inside, other=0.0), hidden, eps)
        if MULTIPLIER != 1.0:
            x = (x.to(tl.float32) * MULTIPLIER).to(x.dtype)
        x = (x.to(tl.float32) + residual).to(x.dtype)
        tl.store(residual_row, x, mask=inside)
    if NORM:
        y = _normalised(x, weight, hidden, eps)
        tl.store(out_ptr + row * out_stride + columns, y, mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x, None, weight, eps, 1.0, None)


def add_rms_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    multiplier: float = 1.0,
    x_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    return _launch(x, residual, weight, eps, multiplier, x_weight)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    multiplier: float,
    x_weight: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, hidden = x.shape
    assert x.stride(1) == 1 and (residual is None or (residual.shape == x.shape and residual.stride(1) == 1))
    assert all(w is None or w.is_contiguous() for w in (weight, x_weight))
    if weight is None:
        assert residual is not None
        out = residual
    else:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(num_tokens,)](
        x,
        residual if residual is not None else x,
        weight if weight is not None else x,
        x_weight if x_weight is not None else x,
        out,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        out.stride(0),
        hidden,
        eps,
        ADD=residual is not None,
        MULTIPLIER=multiplier,
        NORM_X=x_weight is not None,
        NORM=weight is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),  # one 16-byte access per thread and 256 elements of bf16
    )
    return out


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x²) + eps) * weight` over the last dimension.

    x [num_tokens, hidden], weight [hidden]; returns a new tensor like x. The statistics are fp32. A weight of
    x's dtype multiplies the normalised value after its rounding to that dtype, as in Llama; one in fp32
    multiplies before the only rounding, as in Gemma and OLMo 2.
    """
    if x.dtype == torch.float32:
        return torch.rms_norm(x, weight.shape, weight, eps)
    if weight.dtype == torch.float32:
        return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return torch.rms_norm(x, weight.shape, None, eps).mul_(weight)


def add_rms_norm_torch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    multiplier: float = 1.0,
    x_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add `x * multiplier` to the residual stream in place and return the RMSNorm of the sum.

    x, residual [num_tokens, hidden]; every result is rounded to their dtype. weight [hidden]: without it, the
    sum itself is returned. x_weight [hidden]: x is normalised with it before.
    """
    if x_weight is not None:
        x = rms_norm_torch(x, x_weight, eps)
    residual.add_(x if multiplier == 1.0 else x * multiplier)
    return residual if weight is None else rms_norm_torch(residual, weight, eps)


rms_norm = dispatch(rms_norm_triton, rms_norm_torch, cpu.rms_norm)
add_rms_norm = dispatch(add_rms_norm_triton, add_rms_norm_torch, cpu.add_rms_norm)
