"""The gated activations of an MLP: act(gate) * up over a fused gate/up projection (Shazeer, 2020)."""

import torch

from kernels.dispatch import dispatch


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`, [num_tokens, intermediate].

    gate_up [num_tokens, 2 * intermediate] holds the gate first.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def gelu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) * up`, gelu in its tanh approximation, shapes as in `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)


silu_mul = dispatch(silu_mul_torch, silu_mul_torch)
gelu_mul = dispatch(gelu_mul_torch, gelu_mul_torch)
