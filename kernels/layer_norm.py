"""LayerNorm (Ba, Kiros and Hinton, 2016)."""

import torch

from kernels.dispatch import dispatch, tl, triton


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    out_stride,
    hidden,
    eps,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token, the whole row in registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / hidden
    centered = tl.where(inside, x - mean, 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(centered * centered, axis=0) / hidden + eps)
    y = centered * inverse * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    num_tokens, hidden = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(hidden)
    _layer_norm_kernel[(num_tokens,)](
        x,
        weight,
        bias if bias is not None else weight,
        out,
        x.stride(0),
        out.stride(0),
        hidden,
        eps,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


def layer_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension, statistics in fp32.

    x [num_tokens, hidden], weight and bias [hidden] (bias may be None); returns a new tensor like x.
    """
    return torch.layer_norm(x, weight.shape, weight, bias, eps)


layer_norm = dispatch(layer_norm_triton, layer_norm_torch)
