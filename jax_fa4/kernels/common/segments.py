"""Which KV blocks a block of query rows needs under segment ids in any order; and which query blocks a block of keys.

A first kernel (`bounds`) writes the smallest and the largest id of each block of rows and keys, and which remainders
modulo 32 its ids have. A warp of the main kernel then tests 32 blocks at a time: a block is visited if its range of ids
meets that of the tile and they share a remainder, and needs no element mask if both have one and the same id (and the
other masks agree). For sorted ids, and for up to 32 successive ones in any order, that is exact; otherwise it is safe.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from jax_fa4 import masks
from jax_fa4.kernels.common import abi

_LARGEST = 2**31 - 1


def in_mask(mask: masks.Mask) -> bool:
    """Whether a mask has segments."""
    return any(isinstance(part, masks.Segments) for part in mask.parts)


def without(mask: masks.Mask) -> masks.Mask:
    """The mask without its segments."""
    result: masks.Mask = masks.Full()
    for part in mask.parts:
        if not isinstance(part, masks.Segments):
            result &= part
    return result


def scratch(block_q: int, block_k: int) -> tuple[abi.Buffer, ...]:
    """Scratch for `bounds`."""
    return (
        abi.scratch("q_id_bounds", "int32", ("B", ("ceil", "S", block_q), 3)),
        abi.scratch("kv_id_bounds", "int32", ("B", ("ceil", "T", block_k), 3)),
    )


@cute.kernel
def bounds(ids: cute.Tensor, result: cute.Tensor, block: cutlass.Constexpr):
    """(smallest, largest, remainders) of ids [B, length] per block, to result [B, blocks, 3]; grid (blocks, B), a warp
    each. Bit r of the third says that an id has remainder r."""
    index, batch, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    length = ids.shape[1]
    smallest, largest, remainders = Int32(_LARGEST), Int32(-_LARGEST - 1), Int32(0)
    for i in cutlass.range_constexpr((block + 31) // 32):
        position = index * block + i * 32 + lane
        if (position < length) & (i * 32 + lane < block):
            value = ids[batch, position]
            smallest = cutlass.min(smallest, value)
            largest = cutlass.max(largest, value)
            remainders = remainders | (Int32(1) << (value & 31))
    smallest = cute.arch.warp_reduction(smallest, lambda a, b: cutlass.min(a, b))
    largest = cute.arch.warp_reduction(largest, lambda a, b: cutlass.max(a, b))
    remainders = cute.arch.warp_reduction(remainders, lambda a, b: a | b)
    if lane == 0:
        result[batch, index, 0] = smallest
        result[batch, index, 1] = largest
        result[batch, index, 2] = remainders


def launch_bounds(g: Any, dims: Any, block_q: int, block_k: int, stream: Any) -> None:
    """Launches `bounds` for rows and keys."""
    for ids, result, block in ((g.q_segment_ids, g.q_id_bounds, block_q), (g.kv_segment_ids, g.kv_id_bounds, block_k)):
        bounds(ids, result, block).launch(grid=(result.shape[1], dims.B, 1), block=(32, 1, 1), stream=stream)


@dataclasses.dataclass(frozen=True)
class Cursor:
    """Where the walk over blocks stands: pass (0 masked, 1 full), first block of the group of 32, its blocks left."""

    full: Int32
    base: Int32
    left: Int32


@dataclasses.dataclass(frozen=True)
class SegmentBlocks:
    """The blocks [start, end) that a tile visits: KV blocks of a tile of rows, or query blocks of a tile of keys.

    Fields: ids [smallest, largest] of the tile, and their remainders; bounds of the example's blocks; the range that
    the other masks leave, and within it [full_start, full_end) where they keep everything.
    """

    smallest: Int32
    largest: Int32
    remainders: Int32
    bounds: Any
    start: Int32
    full_start: Int32
    full_end: Int32
    end: Int32

    def vote(self, base: Int32, full: Int32) -> Int32:
        """The bits of those among blocks base, ..., base + 31 that pass `full` visits; for a whole warp."""
        block = base + cute.arch.lane_idx()
        meets, is_full = self._tests(block, cutlass.min(block, self.bounds.shape[0] - 1))
        return cute.arch.vote_ballot_sync(meets & (Boolean(is_full) == (full == 1)))

    def words_below(self, top: Int32) -> tuple[Int32, Int32]:
        """Bit i says whether block top - 1 - i is visited, in the second word also without mask; for a whole warp."""
        block = top - 1 - cute.arch.lane_idx()
        meets, is_full = self._tests(block, cutlass.max(cutlass.min(block, self.bounds.shape[0] - 1), 0))
        meets = meets & (block >= self.start)
        return cute.arch.vote_ballot_sync(meets), cute.arch.vote_ballot_sync(meets & is_full)

    def _tests(self, block: Int32, safe: Int32) -> tuple[Boolean, Boolean]:
        """Whether a block, whose bounds are those at `safe`, is visited, and whether a visit then needs no mask."""
        smallest, largest, remainders = (self.bounds[safe, i] for i in range(3))
        meets = (block < self.end) & (smallest <= self.largest) & (largest >= self.smallest)
        meets = meets & ((remainders & self.remainders) != 0)
        one_id = (smallest == largest) & (self.smallest == self.largest)
        return meets, one_id & (block >= self.full_start) & (block < self.full_end)


@dataclasses.dataclass(frozen=True)
class Remembered(SegmentBlocks):
    """The same, with the bits of its first 32 blocks at hand: without mask, and with it."""

    first_masked: Int32
    first_full: Int32

    def vote(self, base: Int32, full: Int32) -> Int32:
        return _remembered(self, base, full)


@cute.jit
def _remembered(blocks: Remembered, base: Int32, full: Int32):
    bits = Int32(cutlass.select_(full == 1, blocks.first_full, blocks.first_masked))
    if base != blocks.start:
        bits = SegmentBlocks.vote(blocks, base, full)
    return bits


def remembered(blocks: SegmentBlocks) -> Remembered:
    """The blocks, to be walked through several times: what comes from memory is fetched once, if they are up to 32."""
    return Remembered(**vars(blocks), first_masked=blocks.vote(blocks.start, Int32(0)),
                      first_full=blocks.vote(blocks.start, Int32(1)))  # fmt: skip


def segment_blocks(mask: masks.Mask, q_block: Int32, block_q: int, block_k: int, geometry: Any, bounds: tuple):
    """The KV blocks of a block of rows; `bounds` are those of its example, (blocks of rows, 3) and (KV blocks, 3)."""
    q_bounds, kv_bounds = bounds
    ranges = masks.block_range(without(mask), q_block, block_q, block_k, geometry)
    return of_ids(q_bounds[q_block, None], kv_bounds, ranges)


def query_blocks(mask: masks.Mask, kv_block: Int32, block_q: int, block_k: int, geometry: Any, bounds: tuple):
    """The query blocks of a block of keys; `bounds` as for `segment_blocks`."""
    q_bounds, kv_bounds = bounds
    ranges = masks.query_block_range(without(mask), kv_block, block_q, block_k, geometry)
    return of_ids(kv_bounds[kv_block, None], q_bounds, ranges)


def of_ids(ids: cute.Tensor, bounds: cute.Tensor, ranges: tuple) -> SegmentBlocks:
    """The blocks that meet `ids`, a block's bounds, in (start, full_start, full_end, end)."""
    return SegmentBlocks(*(ids[i] for i in range(3)), bounds, *(Int32(x) for x in ranges))


@cute.jit
def meeting(ids: cute.Tensor, bounds: cute.Tensor, start: Int32, end: Int32):
    """How many of the blocks [start, end) meet `ids`, a block's bounds; for a whole warp."""
    some = Int32(0)
    blocks = of_ids(ids, bounds, (start, start, start, end))
    for base in cutlass.range(start, end, 32, unroll=1):
        some += cute.arch.popc(blocks.vote(base, Int32(0)))
    return some


@cute.jit
def count(blocks: SegmentBlocks):
    """(masked, full) blocks to visit."""
    masked, full = Int32(0), Int32(0)
    for base in cutlass.range(blocks.start, blocks.end, 32, unroll=1):
        masked += cute.arch.popc(blocks.vote(base, Int32(0)))
        full += cute.arch.popc(blocks.vote(base, Int32(1)))
    return masked, full


@cute.jit
def advance(blocks: SegmentBlocks, cursor: Cursor):
    """The next block and the cursor behind it; there must be one (see `count`)."""
    full, base, left = cursor.full, cursor.base, cursor.left
    while left == 0:
        base += 32
        if base >= blocks.end:
            base = blocks.start
            full += 1
        left = blocks.vote(base, full)
    block = base + cute.arch.popc((left & -left) - 1)
    return block, Cursor(full, base, left & (left - 1))


def nothing(blocks: SegmentBlocks) -> SegmentBlocks:
    """One masked block, the first of the range, whatever its ids are."""
    lowest, highest = Int32(-_LARGEST - 1), Int32(_LARGEST)
    zero = Int32(0)
    return SegmentBlocks(lowest, highest, Int32(-1), blocks.bounds, blocks.start, zero, zero, blocks.start + 1)


def begin(blocks: SegmentBlocks) -> Cursor:
    """The cursor before the first block."""
    return Cursor(Int32(0), blocks.start, blocks.vote(blocks.start, Int32(0)))
