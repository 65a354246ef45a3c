"""The key blocks that a work visits, from the last one down, and which of its query tiles visit each of them.

Without segment ids a tile visits all blocks between its first and its last one, which every role computes alike. With
them it visits those among them whose ids meet its own: see `groups`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cutlass import Boolean, Int32

from jax_fa4 import masks
from jax_fa4.kernels.common.mask import NUMBERS


@dataclasses.dataclass(frozen=True)
class KeyBlocks:
    """The key blocks of one query tile: within [start, end), first and last included; [full_start, full_end) need no
    mask.

    There is always one: a tile without any key visits a block of which its mask keeps nothing.
    """

    start: Int32
    full_start: Int32
    full_end: Int32
    end: Int32

    @property
    def count(self) -> Int32:
        return self.end - self.start

    def has(self, block: Int32) -> Boolean:
        return (block >= self.start) & (block < self.end)


def part(ranges: list[tuple], split: Any, splits: Any, numbers: masks.Numbers = NUMBERS) -> list[tuple]:
    """The split's part of each tile's (start, full_start, full_end, end): the tiles' blocks together are cut evenly."""
    n = numbers
    first, last = ranges[0], ranges[-1]
    start, end = n.minimum(first[0], last[0]), n.maximum(first[3], last[3])
    length = n.floor_divide(end - start + splits - 1, splits)
    low = n.minimum(start + split * length, end)
    high = n.minimum(low + length, end)
    return [tuple(n.minimum(n.maximum(edge, low), high) for edge in edges) for edges in ranges]


def at_least_one(
    ranges: list[tuple], beyond: Any, numbers: masks.Numbers = NUMBERS
) -> tuple[tuple[KeyBlocks, ...], Any, Any]:
    """Key blocks of the tiles, and the (start, end) of all.

    A tile without any gets a block that holds no key for it: where another tile begins, or `beyond`, the end of all
    blocks that any tile visits in any split.
    """
    n = numbers
    anchor = beyond
    for start, _, _, end in ranges:
        anchor = n.where(start < end, start, anchor)
    tiles = []
    for start, full_start, full_end, end in ranges:
        edges = zip((start, full_start, full_end, end), (anchor, anchor, anchor, anchor + 1), strict=True)
        tiles.append(KeyBlocks(*(n.where(start < end, given, made) for given, made in edges)))
    first, last = tiles[0], tiles[-1]
    return tuple(tiles), n.minimum(first.start, last.start), n.maximum(first.end, last.end)


@dataclasses.dataclass(frozen=True)
class Visit:
    """A key block. By ids also: bit i of `marks` says that query tile i visits it."""

    block: Int32
    marks: Int32


def nowhere() -> Visit:
    """Before the first block and after the last: no tile is there."""
    return Visit(Int32(-1), Int32(0))


@dataclasses.dataclass(frozen=True)
class Cursor:
    """`left` blocks below `top` are still to be visited.

    By ids: bit i of a tile's word says that it has yet to visit block top - 1 - i; `read` groups have been read so far,
    in all works.
    """

    top: Int32
    left: Int32
    words: tuple[Int32, Int32]
    read: Int32


@dataclasses.dataclass(frozen=True)
class Visits:
    """Attributes:
    tiles: between which blocks each query tile's lie.
    count: how many blocks any tile visits.
    groups: the queue by which those come that ids leave; None if all are visited.
    """

    tiles: tuple[KeyBlocks, ...]
    count: Int32
    groups: Any = None

    def next(self, cursor: Cursor) -> tuple[Visit, Cursor]:
        """The next block and the cursor behind it; after the last one, a visit of no tile."""
        if self.groups is not None:
            return self.groups.next(cursor)
        block = cursor.top - 1
        return Visit(block, Int32(0)), dataclasses.replace(cursor, top=block)

    def has(self, tile: int, visit: Visit) -> Boolean:
        """Whether a query tile makes the visit."""
        return self.tiles[tile].has(visit.block) if self.groups is None else (visit.marks & (1 << tile)) != 0

    def of(self, tile: Int32) -> KeyBlocks:
        """Those of a tile whose number is known at run time."""
        if len(self.tiles) == 1:
            return self.tiles[0]
        first, second = (vars(blocks) for blocks in self.tiles)
        return KeyBlocks(**{name: NUMBERS.where(tile == 0, first[name], second[name]) for name in first})
