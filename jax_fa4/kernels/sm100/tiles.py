"""Which work a CTA does, computed alike by every role: its query tiles and the key blocks each of them visits.

CTAs that share their products (`plan.cta_group`) do the same work, each for its own rows of the query tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cutlass import Boolean, Int32

from jax_fa4 import masks
from jax_fa4.kernels.common import sequence
from jax_fa4.kernels.common.mask import NUMBERS
from jax_fa4.kernels.common.scheduler import TileSchedule
from jax_fa4.kernels.sm100.plans import BLOCK_K, ForwardPlan
from jax_fa4.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class KeyBlocks:
    """The key blocks of one query tile, visited from end - 1 down to start; [full_start, full_end) need no mask.

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


@dataclasses.dataclass(frozen=True)
class Work:
    """A CTA's current work.

    Attributes:
      first_tile: index of its first query tile (of `plan.q_rows` rows) among those of the query sequence.
      head: query head; under GQA packing KV head.
      kv_head, batch: indices.
      split: which part of the key blocks this is, under split-KV.
      geometry: of the example, for masks.
      tiles: key blocks of each query tile.
      start, end: the blocks loaded: the union of the tiles' blocks, which are adjacent or overlap.
    """

    first_tile: Int32
    head: Int32
    kv_head: Int32
    batch: Int32
    split: Int32
    geometry: Any
    tiles: tuple[KeyBlocks, ...]
    start: Int32
    end: Int32

    @property
    def count(self) -> Int32:
        return self.end - self.start

    def blocks_of(self, tile: Int32) -> KeyBlocks:
        """The key blocks of a tile whose number is known at run time."""
        if len(self.tiles) == 1:
            return self.tiles[0]
        first, second = (vars(blocks) for blocks in self.tiles)
        return KeyBlocks(**{name: NUMBERS.where(tile == 0, first[name], second[name]) for name in first})


@dataclasses.dataclass(frozen=True)
class WorkList:
    """All work of the kernel: the schedule, and the arrays and sizes that decide what a tile visits.

    Under split-KV the key blocks of a CTA's tiles are divided among `splits` CTAs; otherwise `splits` is 1.
    """

    spec: AttentionSpec
    plan: ForwardPlan
    schedule: TileSchedule
    splits: Int32
    g: Any
    dims: Any

    @property
    def count(self) -> Int32:
        return self.schedule.count * self.splits

    @property
    def masks_left(self) -> bool:
        """Whether the mask may remove keys on the left of a row's interval."""
        return any(isinstance(part, masks.Window) and part.left is not None for part in self.spec.mask.parts)

    def at(self, number: Int32) -> Work:
        spec, plan = self.spec, self.plan
        split = Int32(0)
        if plan.split_kv:
            split = number % self.splits
            number = number // self.splits
        tile = self.schedule.tile(number)
        geometry = sequence.geometry(spec, self.g, self.dims, tile.batch)
        first_tile = tile.q_block * plan.q_tiles
        ranges = [
            masks.block_range(spec.mask, first_tile + i, plan.q_rows // plan.packed_heads, BLOCK_K, geometry)
            for i in range(plan.q_tiles)
        ]
        ranges = [tuple(Int32(edge) for edge in edges) for edges in ranges]
        beyond = NUMBERS.maximum(ranges[0][3], ranges[-1][3])
        if plan.split_kv:
            ranges = part(ranges, split, self.splits)
        tiles, start, end = at_least_one(ranges, beyond)
        kv_head = tile.head // (spec.group // plan.packed_heads)
        return Work(first_tile, tile.head, kv_head, tile.batch, split, geometry, tiles, start, end)


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
