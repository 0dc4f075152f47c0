"""LayerNorm (Ba, Kiros and Hinton, 2016)."""

import torch

from kernels.dispatch import dispatch


def layer_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension, statistics in fp32.

    x [num_tokens, hidden], weight and bias [hidden] (bias may be None); returns a new tensor like x.
    """
    return torch.layer_norm(x, weight.shape, weight, bias, eps)


layer_norm = dispatch(layer_norm_torch, layer_norm_torch)
