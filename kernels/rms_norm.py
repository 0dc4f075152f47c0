"""RMSNorm, alone and fused with the residual addition before it (Zhang and Sennrich, 2019)."""

import torch

from kernels.dispatch import dispatch


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x²) + eps) * weight` over the last dimension.

    x [num_tokens, hidden], weight [hidden] of the same dtype; returns a new tensor like x. The statistics are
    fp32; the normalised value is rounded to x's dtype before it meets the weight, as in transformers.
    """
    if x.dtype == torch.float32:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return torch.rms_norm(x, weight.shape, None, eps).mul_(weight)


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to the residual stream in place and return the RMSNorm of the sum.

    x, residual [num_tokens, hidden], weight [hidden], all of one dtype; the sum is rounded to that dtype.
    """
    return rms_norm_torch(residual.add_(x), weight, eps)


rms_norm = dispatch(rms_norm_torch, rms_norm_torch)
add_rms_norm = dispatch(add_rms_norm_torch, add_rms_norm_torch)
