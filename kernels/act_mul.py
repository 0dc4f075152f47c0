"""The gated activations of an MLP: act(gate) * up over a fused gate/up projection (Shazeer, 2020)."""

import torch

from kernels.cpu import act_mul as cpu
from kernels.dispatch import dispatch, tl, triton

_BLOCK = 1024


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return act(x) of fp32 values: silu, gelu, or gelu_tanh."""
    if ACTIVATION == "silu":
        factor = tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        factor = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # gelu's 0.5 * (1 + tanh(y)) is sigmoid(2 * y).
        factor = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x * factor


@triton.jit
def _act_mul_kernel(
    gate_up_ptr, out_ptr, in_stride, out_stride, intermediate, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per token and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < intermediate
    gate_row = gate_up_ptr + row * in_stride + columns
    gate = tl.load(gate_row, mask=inside, other=0.0)
    up = tl.load(gate_row + intermediate, mask=inside, other=0.0)
    activated = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
    tl.store(
        out_ptr + row * out_stride + columns, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside
    )


def _launch(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    num_tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(num_tokens, intermediate)
    if num_tokens:
        _act_mul_kernel[(num_tokens, triton.cdiv(intermediate, _BLOCK))](
            gate_up, out, gate_up.stride(0), out.stride(0), intermediate, ACTIVATION=activation, BLOCK=_BLOCK
        )
    return out


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    return _launch(gate_up, "silu")


def gelu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    return _launch(gate_up, "gelu")


def gelu_tanh_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    return _launch(gate_up, "gelu_tanh")


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`, [num_tokens, intermediate].

    gate_up [num_tokens, 2 * intermediate] holds the gate first. The activation is rounded to its dtype
    before the product, as in transformers.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def gelu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) * up`, gelu exact (with erf), shapes as in `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate).mul_(up)


def gelu_tanh_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) * up`, gelu in its tanh approximation, shapes as in `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)


silu_mul = dispatch(silu_mul_triton, silu_mul_torch, cpu.silu_mul)
gelu_mul = dispatch(gelu_mul_triton, gelu_mul_torch)
gelu_tanh_mul = dispatch(gelu_tanh_mul_triton, gelu_tanh_mul_torch, cpu.gelu_tanh_mul)
