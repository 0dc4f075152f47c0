"""Weight-only int4: groups of inputs have one scale, and in checkpoints a zero point, too (W4A16).

A conversion from unquantized weights is symmetric. Its scale makes the largest value of a group the code -8,
which symmetric formats with equal limits leave unused, or is up to a quarter smaller if the squares of all
errors then sum to less. On normal values in groups of 128 the error is 9.7 % of their deviation, 10.3 %
without the search, 11.7 % with codes of -7 to 7, and 9.6 % with zero points and a search, which take more
memory and time.
"""

import math

import torch
from torch import Tensor

from kernels.expert_routing import ExpertGroups
from kernels.four_bit_grouped import four_bit_grouped
from kernels.four_bit_linear import four_bit_linear
from kernels.four_bit_weight import (
    GROUP_SIZES,
    TILE_INPUTS,
    TILE_ROWS,
    FourBitWeight,
    num_tiles,
    pack_rows,
)
from kernels.grouped_linear import GatedActivation
from models.errors import ModelError
from models.formats.base import LinearShape, LinearWeights, MakeLinear, Shard, UnquantizedWeights
from models.formats.dense import DenseWeights, with_dense_head

_SMALLEST_GROUP = min(GROUP_SIZES)
_ZERO = 8  # the code of 0.0 without a zero point
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's scale that are tried


def conversion(dtype: torch.dtype, device: torch.device, shard: Shard) -> MakeLinear:
    """Return a maker of int4 linears in groups of 128 inputs, or of 64 or 32 where 128 do not divide them.

    Linears whose inputs, or a rank's share of them, are no multiple of 32 stay dense, and so does the head.
    """

    def make(shape: LinearShape, dtype: torch.dtype, device: torch.device, shard: Shard) -> LinearWeights:
        groups = [size for size in GROUP_SIZES if shape.in_features % size == 0]
        parts = shard.world if shape.shard == "row" else 1
        if not groups or shape.in_features % (_SMALLEST_GROUP * parts):
            weights = DenseWeights(shape, dtype, device, shard)
            weights.fallback = (
                f"int4 takes a multiple of {_SMALLEST_GROUP} inputs on each rank: they are kept in "
                f"{str(dtype).removeprefix('torch.')}"
            )
            return weights
        return Int4Weights(shape, dtype, device, shard, groups[-1])

    return with_dense_head(make, dtype, device, shard)


class Int4Weights(UnquantizedWeights):
    """Codes of four bits in tiles, and the scales and zero points of their groups.

    Filled from unquantized weights, or with codes that a checkpoint stores.
    """

    def __init__(
        self,
        shape: LinearShape,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        group_size: int,
        *,
        codes_are_floats: bool = False,
    ) -> None:
        """Take the group size of the whole weight: a multiple of 32, or at least all inputs.

        With `codes_are_floats` codes are FP4 numbers, not integers. Raises ModelError for another group size,
        or if a rank's inputs begin or end within 32 inputs of a group.
        """
        super().__init__(shape, dtype, device, shard)
        first, end = self._columns.start, self._columns.stop
        self.stored_group_size = min(group_size, shape.in_features)
        self._repeats = 1  # groups here for one of the whole weight
        if group_size >= shape.in_features:
            self._group_size = num_tiles(1, self.in_features)[1] * TILE_INPUTS
            self._groups = slice(0, 1)
        else:
            # A group that ranks divide becomes several with one scale.
            size = math.gcd(group_size, first, 0 if end == shape.in_features else end)
            size = size if size % TILE_INPUTS == 0 else math.gcd(size, TILE_INPUTS)
            if size < _SMALLEST_GROUP:
                raise ModelError(
                    f"groups of {group_size} with inputs {first} to {end} of {shape.in_features} cannot be "
                    f"divided into groups of {_SMALLEST_GROUP} or more"
                )
            self._repeats, self._group_size = group_size // size, size
            self._groups = slice(first // size, -(-end // size))
        self._rows_of_expert = self.out_features // max(1, shape.num_experts)
        self._codes_are_floats = codes_are_floats
        self._weight: FourBitWeight | None = None

    def _fill_rows(self, first: int, rows: Tensor) -> None:
        codes, scales = quantize(rows.to(self._device), self.stored_group_size, self._dtype)
        self._store(first, codes, scales)

    def fill_codes(self, name: str, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Load the output `name` of the whole model.

        codes uint8 [out_features, in_features], 0 to 15; scales [out_features, groups]; zeros uint8 of that
        shape, 0 to 15, None: 8. A value is (code - zero) * scale, or FP4 * scale if codes are floats.
        """
        rows, first = self._rows[name]
        self._store(first, codes[rows], scales[rows], None if zeros is None else zeros[rows])

    def _store(self, first: int, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Keep n rows from row `first` of the rank on, all of one expert; the rest as in `fill_codes`.

        Either all rows have zeros or none has.
        """
        if self._weight is None:
            self._weight = self._allocate(scales.dtype, zeros is not None)
        expert, row = divmod(first, self._rows_of_expert)
        kept = self._weight.expert(expert)
        rows = torch.arange(row, row + len(codes), device=self._device)
        packed = pack_rows(codes[:, self._columns].to(self._device))
        kept.values.transpose(1, 2)[rows // TILE_ROWS, rows % TILE_ROWS] = packed
        for of_groups, target in ((scales, kept.scales), (zeros, kept.zeros)):
            if of_groups is not None and target is not None:
                mine = of_groups.repeat_interleave(self._repeats, 1)[:, self._groups].t()
                target[: len(mine), row : row + len(codes)].copy_(mine)

    def _allocate(self, scale_dtype: torch.dtype, has_zeros: bool) -> FourBitWeight:
        """Return the weight of all experts, or of one, with scales of 0."""
        row_tiles, input_tiles = num_tiles(self._rows_of_expert, self.in_features)
        experts = max(1, self.num_experts)
        num_groups = -(-input_tiles * TILE_INPUTS // self._group_size)
        groups = (experts, num_groups, row_tiles * TILE_ROWS)
        values = (experts, row_tiles, input_tiles, TILE_ROWS, TILE_INPUTS // 2)
        return FourBitWeight(
            values=torch.zeros(values, dtype=torch.uint8, device=self._device),
            scales=torch.zeros(groups, dtype=scale_dtype, device=self._device),
            zeros=torch.full(groups, _ZERO, dtype=torch.uint8, device=self._device) if has_zeros else None,
            group_size=self._group_size,
            in_features=self.in_features,
            out_features=self._rows_of_expert,
            is_float=self._codes_are_floats,
        )

    def matmul(self, x: Tensor) -> Tensor:
        assert self._weight is not None, "multiplied before its weights were loaded"
        return four_bit_linear(x, self._weight.expert(0), self._bias)

    def grouped_matmul(
        self, x: Tensor, groups: ExpertGroups, activation: GatedActivation | None = None
    ) -> Tensor:
        assert self._weight is not None, "multiplied before its weights were loaded"
        bias = None if self._bias is None else self._by_expert(self._bias)
        return four_bit_grouped(x, self._weight, groups, bias=bias, activation=activation)


def quantize(rows: Tensor, group_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows [n, k] of floats as codes uint8 [n, k] and scales [n, groups] in a dtype.

    (codes - 8) * scales is near rows. Scales may be negative: the largest value of a group has the code 0.
    The scale of a group with NaN, infinity or a value too large for the dtype is NaN, so that no answer comes
    of it.
    """
    groups = rows.float().reshape(len(rows), -1, group_size)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    codes = torch.full(groups.shape, _ZERO, dtype=torch.uint8, device=rows.device)
    scales = torch.full(largest.shape, torch.nan, dtype=dtype, device=rows.device)
    unit = torch.where(largest != 0, largest, 1.0)  # squares of other errors may overflow
    least = torch.full_like(largest, torch.inf)
    for shrink in _SHRINKS:
        scale = (largest * (-shrink / _ZERO)).to(dtype)
        wide = scale.float()
        # A group of zeros has the scale 0, and any divisor makes its values 0.
        values = (groups / torch.where(wide != 0, wide, 1.0)).round_().clamp_(-_ZERO, 15 - _ZERO)
        error = ((values * wide - groups) / unit).square_().sum(2, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        scales = torch.where(better, scale, scales)
        codes = torch.where(better, (values + _ZERO).to(torch.uint8), codes)
    return codes.flatten(1), scales.squeeze(2)
