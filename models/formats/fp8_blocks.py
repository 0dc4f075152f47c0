"""Weights of fp8 that have a scale for each block of 128 x 128, as checkpoints store them.

weight float8_e4m3fn [out_features, in_features] and its scale [out_features / 128, in_features / 128],
rounded up, by which values are multiplied. Activations are quantized in groups of 128 inputs of a token.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.block_linear import BLOCK, block_linear
from kernels.expert_routing import ExpertGroups
from models.errors import ModelError
from models.formats.base import LinearShape, LinearWeights, Shard
from models.formats.stored_scaled_rows import Storage, StoredScaledRows


class BlockWeights(StoredScaledRows):
    """Rows of fp8 and the scales of their blocks. Experts are weight-only.

    Outputs, or a rank's part of them, need not begin with a block. A scale is then kept for as many rows as
    divide all of them evenly, and that of a block several times.
    """

    def __init__(
        self,
        modules: Sequence[str],
        shape: LinearShape,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        storage: Storage,
    ) -> None:
        super().__init__(modules, shape, dtype, device, shard, storage)
        first, end = self._columns.start, self._columns.stop
        if first % BLOCK or (end % BLOCK and end != shape.in_features):
            raise ModelError(
                f"{', '.join(modules)}: the inputs {first} to {end} of a rank begin or end within a block of "
                f"{BLOCK}"
            )
        self._blocks = slice(first // BLOCK, -(-end // BLOCK))
        starts = [start for rows, first in self._rows.values() for start in (rows.start, first)]
        self._rows_of_scale = math.gcd(BLOCK, self.out_features, *starts)

    def _scale_shape(self) -> tuple[int, ...]:
        return self.out_features // self._rows_of_scale, self._blocks.stop - self._blocks.start

    def _stored_scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // BLOCK) for size in shape)

    def _fill_scale(self, rows: slice, target: slice, stored: Tensor) -> None:
        _, scale = self._allocate()
        size = self._rows_of_scale
        block = torch.arange(rows.start, rows.stop, size, device=stored.device) // BLOCK
        scale[target.start // size : target.stop // size].copy_(stored[block, self._blocks])

    def _expanded(self, scale: Tensor) -> Tensor:
        of_rows = scale.repeat_interleave(self._rows_of_scale, 0)
        return of_rows.repeat_interleave(BLOCK, 1)[:, : self.in_features]

    def _product(self, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return block_linear(x, values, scale, bias)

    def grouped_sum(
        self,
        x: Tensor,
        groups: ExpertGroups,
        weights: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        # The kernel that sums the results of experts itself has no scales of blocks.
        return LinearWeights.grouped_sum(self, x, groups, weights, shared, shared_gate)
