"""How far a result may lie from the exact one: one table, scaled by the length of the reduction."""

import math

import torch

# Half a unit in the last place of the dtype is what one correct rounding costs.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Roundings of the dtype between input and output, and of fp32 accumulation per term (as a random walk).
_DTYPE_ROUNDINGS = 4
_FP32_ROUNDINGS = 8


def tolerance(dtype: torch.dtype, reduction: int = 1) -> float:
    """Return the bound on |result - exact|, relative to the scale of the values that were combined."""
    accumulation = _FP32_ROUNDINGS * math.sqrt(reduction) * ROUNDING[torch.float32]
    return _DTYPE_ROUNDINGS * ROUNDING[dtype] + accumulation


def assert_close(
    result: torch.Tensor,
    exact: torch.Tensor,
    dtype: torch.dtype,
    reduction: int = 1,
    scale: float | None = None,
) -> None:
    """Compare with a float64 reference; `scale` defaults to the largest magnitude of the reference."""
    assert result.shape == exact.shape, f"shape {tuple(result.shape)}, expected {tuple(exact.shape)}"
    difference = (result.detach().cpu().double() - exact.cpu().double()).abs()
    bound = tolerance(dtype, reduction) * (exact.abs().max().item() if scale is None else scale)
    worst = difference.max().item() if difference.numel() else 0.0
    where = difference.argmax().item() if difference.numel() else 0
    assert worst <= bound, f"off by {worst:.3e} at flat index {where}, allowed {bound:.3e}"
