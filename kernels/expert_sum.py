"""The results of a token's experts, weighted and summed."""

import torch

from kernels.dispatch import dispatch, tl, triton

_BLOCK = 1024


@triton.jit
def add_shared(
    total,  # [BLOCK] fp32
    shared_ptr,
    gate_ptr,
    token,
    columns,
    inside,
    shared_stride,
    gate_stride,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Return the sum of a token's columns with the result of the shared expert, times its gate."""
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * shared_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            shared *= tl.sigmoid(tl.load(gate_ptr + token * gate_stride).to(tl.float32))
        total += shared
    return total


@triton.jit
def _expert_sum_kernel(
    results_ptr,
    weights_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    hidden,
    shared_stride,
    gate_stride,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and block of columns; it adds the experts in the order of the router's choice."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        result = tl.load(results_ptr + pair * hidden + columns, mask=inside, other=0.0)
        total += result.to(tl.float32) * tl.load(weights_ptr + pair)
    total = add_shared(
        total, shared_ptr, gate_ptr, token, columns, inside, shared_stride, gate_stride, HAS_SHARED, HAS_GATE
    )
    tl.store(out_ptr + token * hidden + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def expert_sum_triton(
    results: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    num_tokens, top_k = weights.shape
    hidden = results.shape[1]
    assert results.is_contiguous() and weights.is_contiguous()
    assert shared is None or shared.stride(1) == 1
    out = results.new_empty(num_tokens, hidden)
    if num_tokens:
        _expert_sum_kernel[(num_tokens, triton.cdiv(hidden, _BLOCK))](
            results,
            weights,
            shared if shared is not None else results,
            shared_gate if shared_gate is not None else results,
            out,
            hidden,
            shared.stride(0) if shared is not None else 0,
            shared_gate.stride(0) if shared_gate is not None else 0,
            TOP_K=top_k,
            HAS_SHARED=shared is not None,
            HAS_GATE=shared_gate is not None,
            BLOCK=_BLOCK,
        )
    return out


def expert_sum_torch(
    results: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each token's sum of `weight * result` over its experts, [num_tokens, hidden].

    results [num_tokens * top_k, hidden], weights fp32 [num_tokens, top_k]. `shared` [num_tokens, hidden], the
    result of an expert that all tokens use, is added, times the sigmoid of `shared_gate` [num_tokens, 1] if
    that is given. The sum is fp32, in the order of the router's choice, and rounded once.
    """
    total = (results.float().unflatten(0, weights.shape) * weights[..., None]).sum(1)
    if shared is not None:
        total += shared.float() if shared_gate is None else shared.float() * shared_gate.float().sigmoid()
    return total.to(results.dtype)


expert_sum = dispatch(expert_sum_triton, expert_sum_torch)
