"""WGMMA accumulators by rows: how a thread's registers are shared out over the rows of a tile."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Uint32

from jax_fa4.kernels.common import softmax


def rows_view(accumulator: cute.Tensor) -> cute.Tensor:
    """A WGMMA accumulator ((2 columns, 2 rows, n / 8), 1, 1) as (rows, columns)."""
    groups = cute.size(accumulator) // 4
    return cute.make_tensor(accumulator.iterator, cute.make_layout((2, (2, groups)), stride=(2, (1, 4))))


def packed_rows(p: cute.Tensor, dtype) -> softmax.PackedRows:
    """P as the operand of the second product: 16-bit values in the accumulator's order, (rows, pairs of columns)."""
    words = cute.recast_tensor(p, Uint32)
    layout = cute.make_layout((2, cute.size(words) // 2), stride=(1, 2))
    return softmax.PackedRows(cute.make_tensor(words.iterator, layout), dtype)
