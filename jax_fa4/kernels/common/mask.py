"""Masks inside kernels: `jax_fa4.masks` evaluated on DSL values, the order of KV blocks, and the element mask.

The formulas are those of `masks.row_interval` and `masks.block_range`; this file supplies the DSL's arithmetic, the
order of blocks, and the element mask of a row fragment.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from jax_fa4 import masks, scores
from jax_fa4.kernels.common import scalar_jaxpr
from jax_fa4.kernels.common.softmax import NEG_INF, RowFragment


def _floor_divide(x: Int32, divisor: Any) -> Int32:
    """floor(x / divisor) for a positive divisor; both divisions see numbers that are not negative."""
    if isinstance(divisor, int) and divisor & (divisor - 1) == 0:
        return Int32(x) >> (divisor.bit_length() - 1)
    x = Int32(x)
    negative = x < 0
    magnitude = cutlass.select_(negative, -x - 1, x)
    quotient = magnitude // divisor
    return cutlass.select_(negative, -quotient - 1, quotient)


def _where(condition: Any, yes: Any, no: Any) -> Int32:
    return cutlass.select_(condition, Int32(yes), Int32(no))


NUMBERS = masks.Numbers(
    lambda a, b: cutlass.min(Int32(a), Int32(b)), lambda a, b: cutlass.max(Int32(a), Int32(b)), _where, _floor_divide
)


@dataclasses.dataclass(frozen=True)
class BlockOrder:
    """The KV blocks of one tile in the order in which they are visited; producer and consumers compute the same.

    First comes a full block if there is one, so that every row starts from a whole block's maximum; then those that
    need the element mask, from the right edge down and then the left edge; then the other full blocks, from the right
    down.
    """

    start: Int32
    full_start: Int32
    full_end: Int32
    end: Int32

    @property
    def count(self) -> Int32:
        return self.end - self.start

    @property
    def full_count(self) -> Int32:
        return self.full_end - self.full_start

    @property
    def masked_count(self) -> Int32:
        return self.count - self.full_count

    @property
    def lead(self) -> Int32:
        """How many full blocks come first: 1, or 0 if there are none."""
        return cutlass.min(self.full_count, Int32(1))

    def masked(self, i: Int32) -> Int32:
        """Masked block i."""
        right = self.end - self.full_end
        return cutlass.select_(i < right, self.end - 1 - i, self.full_start - 1 - (i - right))

    def full(self, i: Int32) -> Int32:
        """Full block i."""
        return self.full_end - 1 - i

    @property
    def masked_steps(self) -> Int32:
        """Masked steps after the first one."""
        return self.masked_count - 1 + self.lead

    @property
    def full_steps(self) -> Int32:
        """Full steps after the first one and the masked ones."""
        return self.full_count - self.lead

    def block(self, step: Int32) -> Int32:
        """The block of step 0, 1, ..., count - 1."""
        lead, masked_count = self.lead, self.masked_count
        is_masked = (step >= lead) & (step - lead < masked_count)
        full = cutlass.select_(step < lead, step, step - masked_count)
        return cutlass.select_(is_masked, self.masked(step - lead), self.full(full))


def block_order(mask: masks.Mask, q_block: Int32, block_q: int, block_k: int, geometry: masks.Geometry) -> BlockOrder:
    """The visiting order for a block of query rows; at least one block, whose scores the mask then all removes."""
    start, full_start, full_end, end = masks.block_range(mask, q_block, block_q, block_k, geometry)
    end = cutlass.max(end, start + 1)
    full_end = cutlass.max(cutlass.min(full_end, end), start)
    full_start = cutlass.max(cutlass.min(full_start, full_end), start)
    return BlockOrder(start, full_start, full_end, end)


@cute.jit
def part_of(blocks: Any, part: Any):
    """The blocks (`BlockOrder` or `segments.SegmentBlocks`) of a `scheduler.Part` of a tile.

    If there are none, the one past the end of all, in which no row of the tile has a key. Numbers of blocks and of
    units are below 2**16.
    """
    low, full_start, full_end, high = blocks.start, blocks.full_start, blocks.full_end, blocks.end
    if part.units > 1:
        length, units = Uint32(high - low), Uint32(part.units)
        first, last = Int32(length * Uint32(part.start) // units), Int32(length * Uint32(part.end) // units)
        none = first == last
        high = Int32(cutlass.select_(none, high + 1, low + last))
        low = Int32(cutlass.select_(none, high - 1, low + first))
        full_start = cutlass.min(cutlass.max(full_start, low), high)
        full_end = Int32(cutlass.select_(none, full_start, cutlass.min(cutlass.max(full_end, low), high)))
    return dataclasses.replace(blocks, start=low, full_start=full_start, full_end=full_end, end=high)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a fragment's scores lie.

    Fields: example, query head and query row of each of the fragment's rows, first key of the block, and whether the
    call gives positions.
    """

    batch: Int32
    heads: tuple
    rows: tuple
    key: Int32
    positions: bool


def apply_scores(mods: tuple, scale: float, fragment: RowFragment, place: Place, geometry, operands: tuple) -> None:
    """Turns raw products into scores: scale, then the score mods in order, in place."""
    for r in range(len(fragment.row_steps)):
        for c, step in enumerate(fragment.column_steps):
            value = Float32(fragment.scores[r, c] * scale)
            read = 0
            for mod in mods:
                if isinstance(mod, scores.SoftCap):
                    value = soft_cap(value, mod.cap)
                else:
                    arrays = operands[read : read + mod.function.operand_count]
                    read += mod.function.operand_count
                    indices = _indices(place, r, place.key + fragment.column + step, geometry)
                    value = scalar_jaxpr.call(mod.function, (value, *indices), arrays)
            fragment.scores[r, c] = value


def soft_cap(score: Float32, cap: float) -> Float32:
    """cap * tanh(score / cap) through one exponential and one reciprocal: absolute error about 1e-6 * cap."""
    doubled = cute.math.exp2(score * (2.0 / cap * 1.4426950408889634), fastmath=True)
    return cap - (2.0 * cap) * cute.arch.rcp_approx(doubled + 1.0)


def _indices(place: Place, r: int, key: Int32, geometry: masks.Geometry) -> tuple:
    """(b, h, q, k) as user functions get them: indices, or positions where the call gives positions."""
    q, k = place.rows[r], key
    if place.positions:
        q, k = geometry.q_offset + q * geometry.q_stride, geometry.kv_offset + key * geometry.kv_stride
    return place.batch, place.heads[r], q, k


@dataclasses.dataclass(frozen=True)
class ElementMask:
    """What the element mask of a tile needs beside the scores' place.

    Args:
        mask: the spec's mask.
        intervals: (low, high) keys of each row, from `masks.row_interval`.
        q_ids, kv_ids: for `Segments`: ids of the rows, and the example's ids of all keys in global memory.
        operands: the arrays that predicates read.
    """

    mask: masks.Mask
    intervals: tuple
    q_ids: tuple = ()
    kv_ids: Any = None
    operands: tuple = ()

    def apply(self, fragment: RowFragment, place: Place, geometry: masks.Geometry) -> None:
        """Sets scores that do not survive to -inf."""
        base = place.key + fragment.column
        bounded = any(bounds for bounds in masks.bounds(self.mask, geometry)[:1])
        for c, step in enumerate(fragment.column_steps):
            kv_id = self.key_id(base + step)
            for r in range(len(fragment.row_steps)):
                low, high = self.intervals[r]
                keep = Int32(step) < high - base
                if bounded:
                    keep = keep & (Int32(step) >= low - base)
                for condition in self.conditions(r, base + step, kv_id, place, geometry):
                    keep = keep & condition
                fragment.scores[r, c] = cutlass.select_(keep, fragment.scores[r, c], Float32(NEG_INF))

    def key_id(self, key: Int32) -> Any:
        """The segment id of a key (of the last one, past the end), or None without segments."""
        return None if self.kv_ids is None else self.kv_ids[cutlass.min(key, self.kv_ids.shape[0] - 1)]

    def conditions(self, r: int, key: Int32, kv_id: Any, place: Place, geometry: masks.Geometry) -> list[Boolean]:
        """What a score of row r must satisfy to survive, beside lying in the row's interval."""
        same_segment = [] if kv_id is None else [kv_id == self.q_ids[r]]
        indices = _indices(place, r, key, geometry)
        return same_segment + [Boolean(scalar_jaxpr.call(f, indices, arrays)) for f, arrays in self._predicates()]

    def _predicates(self) -> list[tuple]:
        """Each predicate's function with the arrays that it reads."""
        found, read = [], 0
        for part in self.mask.parts:
            if isinstance(part, masks.Predicate):
                count = part.function.operand_count
                found.append((part.function, self.operands[read : read + count]))
                read += count
        return found
