"""Tiles that would leave multiprocessors idle at the end are cut into pieces along their steps.

Where all tiles have as many steps, as in full attention, those left over after the last full wave are cut, and some
more: multiprocessors are not equally fast, and pieces even that out. Under other masks tiles differ, the shorter ones
come last and do the same, and kernels are compiled without cutting.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from jax_fa4.kernels.common.key_tiles import KeySchedule, KeyTile

MOST_PIECES = 32
"""Of one tile; where there are full waves before, a quarter of it."""

SLABS = 264
"""Of all tiles: two for each multiprocessor of an H200. XLA plans a program's scratch without knowing its device."""

MORE_TILES = 12
"""Cut besides the leftover ones."""


@dataclasses.dataclass(frozen=True)
class Piece(KeyTile):
    """The `piece`th part of a tile, and the `slab`th of all pieces; or a whole tile, and then `slab` is negative."""

    piece: Int32
    slab: Int32
    inverse: Int32

    def part(self, count: Int32) -> tuple[Int32, Int32]:
        before = _divide(count * self.piece, self.inverse)
        after = cutlass.min(_divide(count * (self.piece + 1), self.inverse), count)
        whole = self.slab < 0
        return cutlass.select_(whole, 0, before), cutlass.select_(whole, count, after - before)


@dataclasses.dataclass(frozen=True)
class CutSchedule(KeySchedule):
    """The tiles after the first `whole` are cut into so many `pieces` each, and every piece has a number.

    `inverse` is 1 / pieces for `_divide`: a division takes each warp a few hundred cycles a tile.
    """

    whole: Int32
    pieces: Int32
    inverse: Int32

    @property
    def count(self) -> Int32:
        return self.whole + self.cut_tiles * self.pieces

    @property
    def cut_tiles(self) -> Int32:
        return self.blocks * self.heads * self.batch - self.whole

    def tile(self, number: Int32) -> Piece:
        slab = number - self.whole
        cut = _divide(cutlass.max(slab, 0), self.inverse)
        tile = super().tile(cutlass.min(number, self.whole) + cut)
        return Piece(tile.block, tile.head, tile.batch, tile.tile_heads, slab - cut * self.pieces, slab, self.inverse)


def cut(schedule: KeySchedule, plan, dims) -> CutSchedule:
    """The schedule for the call's device, with tiles cut if that is faster."""
    fields = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}
    heads = plan.tile_heads if schedule.tile_heads is None else schedule.tile_heads
    whole, pieces = _choose(schedule.count, heads, plan, dims)
    return CutSchedule(**fields, whole=whole, pieces=pieces, inverse=(1 << 30) // pieces * 2 + 2)


def _divide(number: Int32, inverse: Int32) -> Int32:
    """number / pieces, rounded down, for numbers below 2**30 / pieces."""
    return Int32((Int64(number) * Int64(inverse)) >> 31)


@cute.jit
def _choose(tiles: Int32, heads, plan: cutlass.Constexpr, dims):
    """(whole tiles, pieces of each of the others): what the last wave costs least with, in steps."""
    rule, workers, steps = plan.piece_costs, dims.sm_count, (dims.S + (plan.block_q - 1)) // plan.block_q * heads
    left, most = tiles % workers, Int32(MOST_PIECES)
    if left < tiles:
        most = Int32(cutlass.select_(steps < rule.long, 1, MOST_PIECES // 4))
    pieces, least = Int32(1), Int32(2**31 - 1)
    for number in cutlass.range(1, most + 1, unroll=1):
        rounds = (left * number + workers - 1) // workers
        cost = (rounds * steps + number - 1) // number + rule.tile * rounds
        if number > 1:
            cost += rule.sums + left * number // rule.slabs
        if Boolean(cost < least) & Boolean((number == 1) | (left * number <= SLABS)):
            pieces, least = number, cost
    whole = tiles
    if pieces > 1:
        whole -= left + cutlass.min(cutlass.min(MORE_TILES, SLABS // pieces - left), tiles - left)
    return whole, pieces
