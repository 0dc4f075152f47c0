"""LayerNorm, alone and fused with the residual addition before it (Ba et al., 2016)."""

import torch

from kernels.cpu import rms_norm as cpu
from kernels.dispatch import dispatch, tl, triton


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    hidden,
    eps,
    ADD: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token, the whole row in registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        residual_row = residual_ptr + row * residual_stride + columns
        if MULTIPLIER != 1.0:
            x = (x.to(tl.float32) * MULTIPLIER).to(x.dtype)
        total = x.to(tl.float32) + tl.load(residual_row, mask=inside, other=0.0).to(tl.float32)
        x = total.to(x.dtype)
        tl.store(residual_row, x, mask=inside)
    value = x.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / hidden, 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, axis=0) / hidden + eps)
    y = centred * inverse * weight
    if BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, y.to(x.dtype), mask=inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    multiplier: float,
) -> torch.Tensor:
    num_tokens, hidden = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(hidden)
    _layer_norm_kernel[(num_tokens,)](
        x,
        residual if residual is not None else x,
        weight,
        bias if bias is not None else weight,
        out,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        out.stride(0),
        hidden,
        eps,
        ADD=residual is not None,
        MULTIPLIER=multiplier,
        BIAS=bias is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),  # as in rms_norm
    )
    return out


def layer_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return _launch(x, None, weight, bias, eps, 1.0)


def add_layer_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    multiplier: float = 1.0,
) -> torch.Tensor:
    return _launch(x, residual, weight, bias, eps, multiplier)


def layer_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension.

    x [num_tokens, hidden]; weight and bias [hidden], of x's dtype. All is computed in fp32 and rounded once;
    returns a new tensor like x.
    """
    return torch.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm_torch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """Add `x * multiplier` to the residual stream in place and return the LayerNorm of the sum.

    x, residual [num_tokens, hidden]; the product and the sum are rounded to their dtype.
    """
    return layer_norm_torch(residual.add_(x if multiplier == 1.0 else x * multiplier), weight, bias, eps)


layer_norm = dispatch(layer_norm_triton, layer_norm_torch, cpu.layer_norm)
add_layer_norm = dispatch(add_layer_norm_triton, add_layer_norm_torch, cpu.add_layer_norm)
