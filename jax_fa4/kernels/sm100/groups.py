"""Key blocks by segment ids: the scheduler warp finds those that a work visits, 32 at a time, and tells other roles.

It runs a work ahead of them, so that none waits for the ids' bounds (see `common.segments`) to come from memory. A
group of up to 32 blocks, of which at least one is visited, takes a slot of a queue in shared memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.common import segments
from jax_fa4.kernels.common.mask import NUMBERS
from jax_fa4.kernels.common.segments import SegmentBlocks
from jax_fa4.kernels.sm100.context import arrive_warp
from jax_fa4.kernels.sm100.plans import GROUP_SLOTS
from jax_fa4.kernels.sm100.visits import Cursor, KeyBlocks, Visit, Visits, at_least_one

_WORDS = 10
"""Of a `Group`."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Up to 32 blocks below `top`: bit i of a word stands for block top - 1 - i.

    Fields: for each query tile a word of the blocks that it visits, and one of those that need no mask; of the whole
    work, how many blocks any tile visits, and [start, end) of each tile's.
    """

    top: Int32
    count: Int32
    visited: tuple[Int32, Int32]
    full: tuple[Int32, Int32]
    starts: tuple[Int32, Int32]
    ends: tuple[Int32, Int32]

    def words(self) -> list[Int32]:
        return [self.top, self.count, *self.visited, *self.full, *self.starts, *self.ends]


@dataclasses.dataclass(frozen=True)
class Groups:
    """The queue. `slots` are (word, slot) in shared memory; `rank` is that of the CTA."""

    slots: cute.Tensor
    full: Any
    empty: Any
    rank: Any

    def begin(self, read: Int32) -> tuple[Visits, Cursor]:
        """The visits of a work, and the cursor before the first one; so many groups were read before."""
        group = self.receive(read)
        tiles = tuple(KeyBlocks(*(group.starts[i],) * 3, group.ends[i]) for i in range(2))
        return Visits(tiles, group.count, self), Cursor(group.top, group.count, group.visited, read + 1)

    def receive(self, read: Int32) -> Group:
        """The next group, for a warp, which gives its slot back."""
        slot = read % GROUP_SLOTS
        self.full.wait(slot, read // GROUP_SLOTS % 2)
        top, count, *pairs = (self.slots[i, slot] for i in range(_WORDS))
        arrive_warp(self.empty, slot)
        return Group(top, count, *(tuple(pairs[i : i + 2]) for i in range(0, 8, 2)))

    def next(self, cursor: Cursor) -> tuple[Visit, Cursor]:
        return _next(self, cursor)


@cute.jit
def _next(groups: Groups, cursor: Cursor):
    top, read = cursor.top, cursor.read
    first, second = cursor.words
    if ((first | second) == 0) & (cursor.left > 0):
        group = groups.receive(read)
        top, read = group.top, read + 1
        first, second = group.visited
    place, bit = lowest(first | second)
    marks = Int32(cutlass.select_((first & bit) != 0, Int32(1), Int32(0)))
    marks = marks | Int32(cutlass.select_((second & bit) != 0, Int32(2), Int32(0)))
    return Visit(top - 1 - place, marks), Cursor(top, cursor.left - 1, (first & ~bit, second & ~bit), read)


def lowest(word: Int32) -> tuple[Int32, Int32]:
    """The place of the lowest bit that is set, and that bit; (32, 0) if none is."""
    bit = word & -word
    return cute.arch.popc(bit - 1), bit


@cute.jit
def announce(groups: Groups, blocks: tuple, beyond: Int32, written: Int32):
    """Finds what a work visits and tells the readers; returns `written`, which counts groups, after it.

    `blocks` are the `SegmentBlocks` of its tiles, one or two; `beyond` as for `at_least_one`.
    """
    count, hulls = _survey(blocks[0], blocks[-1])
    hulls = hulls[: len(blocks)]
    tiles, start, end = at_least_one([(low, low, low, high) for low, high in hulls], beyond)
    blocks = tuple(_between(x, hull, tile) for x, hull, tile in zip(blocks, hulls, tiles, strict=True))
    count = cutlass.max(count, 1)
    top = end
    while top > start:
        (first, full_first), (second, full_second) = (*(x.words_below(top) for x in blocks), (Int32(0), Int32(0)))[:2]
        if (first | second) != 0:
            starts, ends = ((tiles[0].start, tiles[-1].start), (tiles[0].end, tiles[-1].end))
            group = Group(top, count, (first, second), (full_first, full_second), starts, ends)
            slot = written % GROUP_SLOTS
            groups.empty.wait(slot, written // GROUP_SLOTS % 2 ^ 1)
            if cute.arch.lane_idx() == 0:
                for i, word in enumerate(group.words()):
                    groups.slots[i, slot] = word
            arrive_warp(groups.full, slot)
            if groups.rank != 0:  # in place of mma, a role of the leading CTA alone
                arrive_warp(groups.empty, slot)
            written += 1
        top -= 32
    return written


def _between(blocks: SegmentBlocks, hull: tuple, tile: KeyBlocks) -> SegmentBlocks:
    """A tile's blocks from its first to its last one: that one block, whatever its ids, if it has none."""
    anything = segments.nothing(blocks)
    some = hull[0] < hull[1]
    ids = {name: NUMBERS.where(some, getattr(blocks, name), getattr(anything, name))
           for name in ("smallest", "largest", "remainders")}  # fmt: skip
    return dataclasses.replace(blocks, start=tile.start, end=tile.end, **ids)


@cute.jit
def _survey(first: SegmentBlocks, second: SegmentBlocks):
    """How many blocks any of two tiles visits, and the (start, end) of each one's."""
    low0, high0, low1, high1 = Int32(0), Int32(0), Int32(0), Int32(0)
    count, top = Int32(0), cutlass.max(first.end, second.end)
    while top > cutlass.min(first.start, second.start):
        word0, word1 = first.words_below(top)[0], second.words_below(top)[0]
        low0, high0 = _extended(low0, high0, word0, top)
        low1, high1 = _extended(low1, high1, word1, top)
        count += cute.arch.popc(word0 | word1)
        top -= 32
    return count, ((low0, high0), (low1, high1))


def _extended(low: Int32, high: Int32, word: Int32, top: Int32) -> tuple[Int32, Int32]:
    """[low, high), empty at first, and the blocks of a group below it."""
    highest = cute.arch.inline_ptx("bfind.u32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])
    some = word != 0
    high = NUMBERS.where(some & (high == 0), top - lowest(word)[0], high)
    return NUMBERS.where(some, top - 1 - highest, low), high
