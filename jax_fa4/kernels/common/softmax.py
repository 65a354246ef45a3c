"""Online softmax over row fragments: the mathematics every architecture shares.

A thread holds parts of some rows of a score tile. What differs between architectures is only how many rows a thread
holds, which columns of them, and how many lanes share a row: `RowFragment` says all three, so nothing here asks for the
architecture. A step returns P (in place of the scores) and the factor by which earlier results must shrink; it never
touches O: Hopper scales O in registers, Blackwell mails the factor to its correction warps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NEG_INF = -math.inf

LAZY_LIMIT = 2.0**15
"""Largest sum of a lane's exponentials in one block that a lazy step tolerates: below float16's largest value."""


@dataclasses.dataclass(frozen=True)
class RowFragment:
    """A thread's part of a score tile.

    Args:
        scores: (rows, columns) register tensor of float32.
        row: this lane's first row within the tile; row r of the fragment is ``row + row_steps[r]``.
        column: this lane's first column; column c of the fragment is ``column + column_steps[c]``.
        lanes_per_row: neighbouring lanes that share a row: 4 for WGMMA accumulators, 1 where a thread has a whole row.
    """

    scores: Any
    row: Int32
    row_steps: Sequence[int]
    column: Int32
    column_steps: Sequence[int]
    lanes_per_row: int


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """P rounded to 16 bits: words (rows, pairs of neighbouring columns) of two `dtype` values each."""

    words: Any
    dtype: Any

    def store_rows(self, values: cute.Tensor) -> None:
        """Rounds (rows, columns) of float32."""
        for r in range(cute.size(values, mode=[0])):
            for c in range(0, cute.size(values, mode=[1]), 2):
                self.words[r, c // 2] = pack(values[r, c], values[r, c + 1], self.dtype)


def exp2(x: Float32) -> Float32:
    """2**x on the special function unit, subnormals flushed."""
    return cute.math.exp2(x, fastmath=True)


def _tree(op, values: list) -> Any:
    """Reduces `values` pairwise: short dependency chains."""
    while len(values) > 1:
        values = [op(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


class OnlineSoftmax:
    """Running maximum and sum of a fragment's rows.

    Args:
        rows: rows per thread.
        lanes_per_row: lanes that share a row.
        scale_log2: scores are multiplied by it inside the exponent (scale * log2 e, or log2 e after score functions).

    `row_max` is the reference that exponentials are taken against, in raw scores: the running maximum, or after lazy
    steps an earlier one. `row_sum` is this lane's part of the sum of exponentials. `rescale` is the factor by which the
    last exact step shrinks earlier results.
    """

    def __init__(self, rows: int, lanes_per_row: int, scale_log2: float):
        self.rows = rows
        self.lanes_per_row = lanes_per_row
        self.scale_log2 = scale_log2
        self.row_max = cute.make_rmem_tensor((rows,), Float32)
        self.row_sum = cute.make_rmem_tensor((rows,), Float32)
        self.rescale = cute.make_rmem_tensor((rows,), Float32)
        self.bias = cute.make_rmem_tensor((rows,), Float32)

    def reset(self) -> None:
        self.row_max.fill(NEG_INF)
        self.row_sum.fill(0.0)

    def _over_lanes(self, op, value):
        offset = 1
        while offset < self.lanes_per_row:
            value = op(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
            offset *= 2
        return value

    def step(self, fragment: RowFragment, masked: bool) -> None:
        """Turns scores into P in place and updates the statistics; `masked` says whether scores may be -inf."""
        scores = fragment.scores
        columns = len(fragment.column_steps)

        def in_place(r: int, c: int, p: Float32) -> None:
            scores[r, c] = p

        for r in range(self.rows):
            block_max = [scores[r, c] for c in range(min(4, columns))]
            for c in range(4, columns):
                block_max[c % 4] = cute.arch.fmax(block_max[c % 4], scores[r, c])
            old_max = self.row_max[r]
            new_max = self._over_lanes(cute.arch.fmax, cute.arch.fmax(_tree(cute.arch.fmax, block_max), old_max))
            self.row_max[r] = new_max
            # A row without any key so far: its P must come out 0, not NaN; and a lazy step must not take it as a
            # reference, which an infinite bias sees to.
            empty = new_max == NEG_INF
            safe_max = cutlass.select_(empty, Float32(0.0), new_max) if masked else new_max
            bias = safe_max * -self.scale_log2
            self.bias[r] = cutlass.select_(empty, Float32(-NEG_INF), bias) if masked else bias
            self.rescale[r] = exp2((old_max - safe_max) * self.scale_log2)
            # Subtracting first makes the largest P exactly 1, also where the product with the scale would round.
            block_sum = self._exponentials(fragment, r, lambda s, m=safe_max: (s - m) * self.scale_log2, in_place)
            self.row_sum[r] = self.row_sum[r] * self.rescale[r] + block_sum

    def lazy_step(self, fragment: RowFragment, packed: PackedRows) -> tuple[list, Boolean]:
        """Scores to P, rounded into `packed`, against the old reference: no maximum, no rescaling.

        Returns this lane's new sums per row, and whether the warp may keep them. If so, `accept` the sums. Else an
        exponential is too large, or a row has no reference yet: take an exact `step` on the scores, which are still
        there.
        """
        pair: list = []

        def keep(r: int, c: int, p: Float32) -> None:
            pair.append(p)
            if len(pair) == 2:
                packed.words[r, c // 2] = pack(*pair, packed.dtype)
                pair.clear()

        sums = [self._exponentials(fragment, r, self._against(self.bias[r]), keep) for r in range(self.rows)]
        fits = Boolean(True)
        for block_sum in sums:
            fits = fits & (block_sum < LAZY_LIMIT)  # false for NaN too
        return [self.row_sum[r] + sums[r] for r in range(self.rows)], cute.arch.vote_all_sync(fits)

    def accept(self, sums: list) -> None:
        """Takes a lazy step's sums."""
        for r, row_sum in enumerate(sums):
            self.row_sum[r] = row_sum

    def _against(self, bias: Float32):
        return lambda score: score * self.scale_log2 + bias

    def _exponentials(self, fragment: RowFragment, r: int, exponent_of, keep) -> Float32:
        """Exponentials of a row, 2**exponent_of(score), each handed to `keep(r, c, p)`; returns this lane's sum."""
        sums: list = []
        for c in range(len(fragment.column_steps)):
            p = exp2(exponent_of(fragment.scores[r, c]))
            keep(r, c, p)
            if c < 4:
                sums.append(p)
            else:
                sums[c % 4] = sums[c % 4] + p
        return _tree(lambda a, b: a + b, sums)

    def finish(self, sink) -> tuple[list, list]:
        """(1 / sum, LSE in natural log) per row; an empty row gives (0, -inf), with a sink (0, sink).

        `sink` is None or a raw logit per row: it joins the denominator.
        """
        scale = self.scale_log2 * LN_2
        inverses, lses = [], []
        for r in range(self.rows):
            total = self._over_lanes(lambda a, b: a + b, self.row_sum[r])
            reference, shrink = self.row_max[r] * scale, None
            empty = self.row_max[r] == NEG_INF
            if sink is not None:
                reference = cute.arch.fmax(reference, sink[r])
                shrink = exp2((self.row_max[r] * scale - reference) * LOG2_E)
                total = total * shrink + exp2((sink[r] - reference) * LOG2_E)
                empty = total == 0.0
            safe_total = cutlass.select_(empty, Float32(1.0), total)
            lse = reference + cute.math.log2(safe_total, fastmath=True) * LN_2
            lses.append(cutlass.select_(empty, Float32(NEG_INF), lse))
            inverse = cute.arch.rcp_approx(safe_total) if shrink is None else shrink * cute.arch.rcp_approx(safe_total)
            inverses.append(cutlass.select_(empty, Float32(0.0), inverse))
        return inverses, lses


def pack(low: Float32, high: Float32, dtype) -> Uint32:
    """Two float32 rounded to a 16-bit type, in one word."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def convert_pairs(source: cute.Tensor, target: cute.Tensor) -> None:
    """Rounds float32 registers to 16-bit ones of the same order, two per instruction."""
    packed = cute.recast_tensor(target, Uint32)
    for i in range(cute.size(source) // 2):
        packed[i] = pack(source[2 * i], source[2 * i + 1], target.element_type)
