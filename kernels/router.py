"""The router of a mixture of experts: logits of all experts, and the experts of each token.

For few tokens one kernel does both, since each launch is a tenth of such a layer's time. The program that
is the last to finish a part of a token's logits chooses the token's experts.
"""

from functools import cache

import torch

from kernels.dispatch import dispatch, tl, triton
from kernels.expert_routing import (
    RouterOptions,
    choice_constants,
    choose_experts,
    route_tokens_torch,
    route_tokens_triton,
)
from kernels.linear import linear_fp32

_FEW_TOKENS = 16
_BLOCK_K = 2048


@triton.jit
def _router_kernel(
    x_ptr,
    weight_ptr,
    logit_bias_ptr,
    logits_ptr,
    arrived_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    num_rows,
    num_experts,
    hidden,
    x_stride,
    scale,
    HAS_LOGIT_BIAS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, a single warp, per row of the weight and token: reductions need no barrier."""
    token = tl.program_id(1)
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    products = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, hidden, BLOCK_K):
        inside = k < hidden - start
        x = tl.load(x_ptr + token * x_stride + start + k, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + row * hidden + start + k, mask=inside, other=0.0)
        products += weight.to(tl.float32) * x
    logit = tl.sum(products, 0)
    if HAS_LOGIT_BIAS:
        logit += tl.load(logit_bias_ptr + row).to(tl.float32)
    tl.store(logits_ptr + token * num_rows + row, logit)
    tl.debug_barrier()  # all stores of this program become visible before its arrival
    if tl.atomic_add(arrived_ptr + token, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(arrived_ptr + token, 0)  # ready for the next layer
        choose_experts(
            logits_ptr, bias_ptr, ids_ptr, weights_ptr, token, num_rows, num_experts, scale,
            TOP_K, SIGMOID, NORMALIZE, HAS_BIAS, NUM_GROUPS, TOP_GROUPS, CHOICES, BLOCK,
        )  # fmt: skip


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Return the counters of finished programs, which every launch leaves at 0."""
    return torch.zeros(_FEW_TOKENS, dtype=torch.int32, device=device)


def route_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_experts: int,
    options: RouterOptions,
    logit_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, hidden = x.shape
    num_rows = weight.shape[0]
    if not 0 < num_tokens <= _FEW_TOKENS:
        logits = linear_fp32(x, weight, logit_bias)
        return *route_tokens_triton(logits[:, :num_experts], options, bias), logits[:, num_experts:]
    assert x.stride(1) == 1 and weight.is_contiguous()
    logits = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=x.device)
    ids = torch.empty(num_tokens, options.top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, options.top_k, dtype=torch.float32, device=x.device)
    _router_kernel[(num_rows, num_tokens)](
        x,
        weight,
        logit_bias if logit_bias is not None else x,
        logits,
        _arrivals(x.device),
        bias if bias is not None else logits,
        ids,
        weights,
        num_rows,
        num_experts,
        hidden,
        x.stride(0),
        options.scale,
        HAS_LOGIT_BIAS=logit_bias is not None,
        BLOCK_K=min(_BLOCK_K, triton.next_power_of_2(hidden)),
        **choice_constants(options, num_experts, bias is not None),
        num_warps=1,
    )
    return ids, weights, logits[:, num_experts:]


def route_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_experts: int,
    options: RouterOptions,
    logit_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (expert_ids int32, weights fp32) [num_tokens, top_k], and the other rows' results in fp32.

    x [num_tokens, hidden], weight [num_rows, hidden]: its first num_experts rows give the logits of the
    experts, the others, such as the gate of a shared expert, [num_tokens, num_rows - num_experts].
    logit_bias [num_rows] is added; options and bias are those of `route_tokens`.
    """
    logits = linear_fp32(x, weight, logit_bias)
    return *route_tokens_torch(logits[:, :num_experts], options, bias), logits[:, num_experts:]


route = dispatch(route_triton, route_torch)
