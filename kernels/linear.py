"""y = x Wᵀ (+ b) with a weight that is packed once, at load, for the device it lives on.

    pack_weight(weight [N, K]) -> PackedWeight
    linear(x [T, K], packed, bias [N] | None) -> [T, N] in the dtype of x

CUDA uses cuBLAS through torch. A CPU uses one of three layouts, depending on what it computes in hardware:

- `OneDnnWeight`: the weight reordered into oneDNN's blocked layout, once. For float32, and for bfloat16 and
  float16 where oneDNN has products for them (CPUs with AVX512, best with AMX).
- `WidenedWeight`: bfloat16 and float16 on other CPUs. The weight stays 16 bits wide; a few rows go
  through torch's own half-precision product, more rows through float32 products over tiles of the weight
  that are widened into a scratch tile small enough for the cache.
- `PlainWeight`: `F.linear`, wherever neither applies.

Measured on two AVX2 cores, all products of one SmolLM2-135M decode step, milliseconds by rows of x:

    rows                              1     2     4     8    16    32    64   512
    float32   F.linear               60   104   122   126   113   141   233  1085
              OneDnnWeight           42    42    47    54    65    90   152   966
    bfloat16  F.linear               20    33    70   138   266     -     -     -
              widened tiles          39    45    57   100    77   103   168  1150

On two cores with AMX (Xeon, Sapphire Rapids):

    bfloat16  F.linear               32    33    32    32    32     -    48   242
              OneDnnWeight           24    29    28    28    28     -    31   235
              WidenedWeight          33    34    75    76    82     -   184  1018

There is no Triton kernel here: no hand-written product has been measured to beat the vendor's.
"""

from abc import ABC, abstractmethod
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = ["PackedWeight", "computes_bfloat16", "linear", "linear_fp32", "pack_weight", "unpacked_linear"]

_WIDEN_FROM_ROWS = 4  # from here on widened tiles beat torch's half-precision product (table above)
_TILE_BYTES = 4 << 20  # float32 scratch tile; 1, 2 and 8 MiB were 3-40 % slower at 2 to 32 rows
_PACK_FOR_ROWS = 16  # oneDNN's layout depends on the rows it expects: 16 and 512 do well at all, 1 does not


class PackedWeight(ABC):
    """A weight [N, K] in the layout of its product. Read-only once packed."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype

    @abstractmethod
    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [T, K] times the transposed weight, plus bias [N]: [T, N]."""


class PlainWeight(PackedWeight):
    """The unchanged tensor; it shares storage with other holders, such as a tied embedding."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.weight = weight

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


class OneDnnWeight(PackedWeight):
    """A copy in oneDNN's blocked layout; the source may be freed."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x, self.blocked, bias, "none", [], "")


class WidenedWeight(PlainWeight):
    """A 16-bit weight on a CPU without 16-bit arithmetic: float32 products, accumulated in float32."""

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if rows < _WIDEN_FROM_ROWS:
            return F.linear(x, self.weight, bias)
        wide_x = x.float().t()
        out = x.new_empty(rows, self.out_features)
        step = max(1, min(self.out_features, _TILE_BYTES // (4 * self.in_features)))
        # Allocated per call: the allocator hands back the block that was just used, still warm in the cache.
        tile = torch.empty(step, self.in_features, dtype=torch.float32)
        for start in range(0, self.out_features, step):
            part = self.weight[start : start + step]
            wide = tile[: part.shape[0]].copy_(part)
            # W xᵀ instead of x Wᵀ: for few rows the library is up to twice as fast in this order.
            product = torch.mm(wide, wide_x)
            if bias is not None:
                product += bias[start : start + step, None]
            out[:, start : start + step] = product.t()
        return out


@cache
def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return True if torch has oneDNN's packed product of the dtype, and it is fast on this CPU."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return dtype == torch.float32


@cache
def computes_bfloat16() -> bool:
    """Return True if this CPU multiplies bfloat16 in hardware (AMX or AVX512-BF16), faster than float32."""
    # torch has these checks under private names only; without them the answer is False.
    checks = (
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return any(check() for check in checks if check is not None)


def pack_weight(weight: Tensor) -> PackedWeight:
    """Pack weight [N, K] for its device. The result shares its storage, or holds a copy."""
    if weight.device.type != "cpu":
        return PlainWeight(weight)
    if _onednn_multiplies(weight.dtype):
        return OneDnnWeight(weight)
    if weight.dtype in (torch.bfloat16, torch.float16):
        return WidenedWeight(weight)
    return PlainWeight(weight)


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] times the packed weight [N, K], plus bias [N], in x's dtype, summed in float32."""
    return packed.matmul(x, bias)


def unpacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `linear` does with a weight [N, K] that stays as it is, such as one of a stack."""
    if weight.device.type != "cpu" or weight.dtype == torch.float32 or _onednn_multiplies(weight.dtype):
        return F.linear(x, weight, bias)
    return WidenedWeight(weight).matmul(x, bias)


def linear_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] times weight [N, K], plus bias [N], [T, N] fp32 without a rounding to x's dtype."""
    if not x.is_cuda or x.dtype == torch.float32:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if bias is None:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.addmm(bias.float(), x, weight.t(), out_dtype=torch.float32)
