"""Which key tile a block works on, and the steps of its loop: the same arithmetic in every warp role."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from jax_fa4 import masks
from jax_fa4.kernels.common import segments, sequence
from jax_fa4.kernels.common.pipelines import buffer, free_buffer

NUMBER_STAGES = 2
"""Tile numbers handed out ahead."""


@dataclasses.dataclass(frozen=True)
class KeyTile:
    """Work of one block: a tile of keys of one head of one example.

    The `head` counts KV heads, or if a KV head's query heads are in several tiles, those (see `key_schedule`).
    """

    block: Int32
    head: Int32
    batch: Int32
    tile_heads: Int32 | None

    def part(self, count: Int32) -> tuple[Int32 | None, Int32]:
        """How many of the tile's `count` steps come before its own, if it is a piece, and how many its own are."""
        return None, count


@dataclasses.dataclass(frozen=True)
class KeySchedule:
    """Tile numbers in the order in which they are to start.

    A block begins with its own number, and draws the next from a counter in global memory (`draw`), so that blocks with
    short tiles get more of them.

    Heads are taken in sections, as many as keep their Q, dO and dQ in the L2 cache together. Within a section the
    first key tiles of all heads come first: under a causal mask these have the longest loops. `first_block` and
    `direction` (1 or -1) turn that round, for the deterministic order of dQ's sums, in which a tile waits for those
    with later keys.

    `tile_heads`: query heads of a tile, where that is decided at run time.
    """

    blocks: Int32
    heads: Int32
    batch: Int32
    section_heads: Int32
    first_block: Int32
    direction: Int32
    tile_heads: Int32 | None

    @property
    def count(self) -> Int32:
        return self.blocks * self.heads * self.batch

    def tile(self, number: Int32) -> KeyTile:
        """The tile with this number."""
        per_section = self.section_heads * self.blocks
        section = number // per_section
        within = number - section * per_section
        first = section * self.section_heads
        width = cutlass.min(self.section_heads, self.heads * self.batch - first)
        step = within // width
        head = first + within - step * width
        batch = head // self.heads
        return KeyTile(self.first_block + self.direction * step, head - batch * self.heads, batch, self.tile_heads)


def row_bytes(plan, heads: Int32 | int) -> Int32 | int:
    """Of a row of Q and dO (16-bit) and dQ (float32) of so many heads."""
    return heads * (2 * (plan.tile_d + plan.tile_e) + 4 * plan.tile_d)


def section_heads(plan, tile_heads: Int32 | int, dims) -> Int32:
    """Heads, or groups of `tile_heads`, whose rows fit in the plan's share of L2 together; at least one."""
    return Int32(cutlass.max(Int64(plan.l2_bytes) // (Int64(row_bytes(plan, tile_heads)) * Int64(dims.S)), Int64(1)))


@dataclasses.dataclass(frozen=True)
class Steps:
    """The loop of one key tile: query blocks [start, end) of each query head that shares the KV head, in order.

    Blocks within [full_start, full_end) need no element mask. With `segments` only those blocks are visited whose ids
    meet the tile's. If the `tile` is a piece of one, only its part of the steps is to be done.
    """

    start: Int32
    full_start: Int32
    full_end: Int32
    end: Int32
    geometry: masks.Geometry
    tile: KeyTile
    segments: segments.SegmentBlocks | None = None

    def count(self, heads: Int32 | int) -> Int32:
        """How many steps, for so many query heads."""
        if self.segments is not None:
            return sum(segments.count(self.segments), Int32(0)) * heads
        return self.tile.part((self.end - self.start) * heads)[1]


@dataclasses.dataclass(frozen=True)
class Place:
    """A step: a query block of a query head. `masked`: it needs the element mask.

    With segments also: of the 32 blocks from `base` on, bits of those that come after it, and of those without mask.
    """

    block: Int32
    head: Int32
    masked: Boolean
    base: Int32
    left: Int32
    full: Int32


def nowhere() -> Place:
    """Stands for a step where a tile has none."""
    return Place(Int32(0), Int32(0), Boolean(False), Int32(0), Int32(0), Int32(0))


def first(steps: Steps, head: Int32, heads: Int32 | int = 1) -> Place:
    """The first step of a tile that has any; `head` is the first of its `heads` query heads."""
    if steps.segments is not None:
        return _next_in_segments(steps.segments, head, steps.start, Int32(0), Int32(0), steps.start - 32)
    blocks = steps.end - steps.start
    skipped, _ = steps.tile.part(blocks * heads)
    if skipped is None:
        return _in_interval(steps, steps.start, head)
    before = 0 if isinstance(heads, int) and heads == 1 else skipped // blocks
    return _in_interval(steps, steps.start + skipped - before * blocks, head + before)


def following(steps: Steps, place: Place) -> Place:
    """The step after this one; after the last, any."""
    if steps.segments is not None:
        return _next_in_segments(steps.segments, place.head, place.block, place.left, place.full, place.base)
    wraps = place.block + 1 == steps.end
    block = Int32(cutlass.select_(wraps, steps.start, place.block + 1))
    return _in_interval(steps, block, place.head + Int32(cutlass.select_(wraps, Int32(1), Int32(0))))


def _in_interval(steps, block: Int32, head: Int32) -> Place:
    masked = (block < steps.full_start) | (block >= steps.full_end)
    return Place(block, head, Boolean(masked), Int32(0), Int32(0), Int32(0))


@cute.jit
def _next_in_segments(blocks, head: Int32, block: Int32, left: Int32, full: Int32, base: Int32):
    """The next block that is visited, of this head or the first of the next."""
    while left == 0:
        base += 32
        if base >= blocks.end:
            base = blocks.start
            head += 1
        full = blocks.vote(base, Int32(1))
        left = full | blocks.vote(base, Int32(0))
    offset = cute.arch.popc((left & -left) - 1)
    return Place(base + offset, head, Boolean(((full >> offset) & 1) == 0), base, left & (left - 1), full)


def steps(kernel, g, dims, tile: KeyTile) -> Steps:
    """The loop for a tile, from the example's geometry."""
    plan, spec = kernel.plan, kernel.spec
    geometry = sequence.geometry(spec, g, dims, tile.batch)
    arguments = (spec.mask, tile.block, plan.block_q, plan.block_k, geometry)
    if segments.in_mask(spec.mask):
        bounds = (g.q_id_bounds[tile.batch, None, None], g.kv_id_bounds[tile.batch, None, None])
        blocks = segments.query_blocks(*arguments, bounds)
        return Steps(blocks.start, blocks.full_start, blocks.full_end, blocks.end, geometry, tile, blocks)
    start, full_start, full_end, end = masks.query_block_range(*arguments)
    return Steps(Int32(start), Int32(full_start), Int32(full_end), Int32(end), geometry, tile)


def key_schedule(plan, spec, dims, tile_heads: Int32 | int | None = None) -> KeySchedule:
    """The schedule of a call. A tile has `tile_heads` of the query heads that share a KV head, by default all."""
    tile_heads = spec.group if tile_heads is None else tile_heads
    blocks = (dims.T + (plan.block_k - 1)) // plan.block_k
    first, direction = (blocks - 1, Int32(-1)) if spec.deterministic else (Int32(0), Int32(1))
    heads = dims.K * (spec.group // tile_heads)
    section = section_heads(plan, tile_heads, dims)
    dynamic = None if isinstance(tile_heads, int) else tile_heads
    return KeySchedule(blocks, heads, dims.B, section, first, direction, dynamic)


@cute.jit
def draw(pipes, shared, counter: cute.Tensor, turn: Int32) -> Int32:
    """The producer warp's next tile number, handed to the block's other warps too, as the `turn`th."""
    state = free_buffer(turn, NUMBER_STAGES)
    pipes.numbers.producer_acquire(state)
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        number = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu") + cute.arch.grid_dim()[0]
        shared.numbers[state.index] = number
        pipes.numbers.producer_commit(state)
    return cute.arch.shuffle_sync(number, 0)


@cute.jit
def receive(pipes, shared, turn: Int32, copied: cutlass.Constexpr = False) -> Int32:
    """The next tile number, in any other warp. `copied`: bulk copies bring it, from another block of the cluster."""
    state = buffer(turn, NUMBER_STAGES)
    pipes.numbers.consumer_wait(state)
    number = Int32(0)
    if cute.arch.lane_idx() == 0:  # alone, as it alone gives the number's place back
        number = shared.numbers[state.index]
        if cutlass.const_expr(copied):
            cute.arch.fence_view_async_shared()  # it is read: another copy may replace it
        pipes.numbers.consumer_release(state)
    return cute.arch.shuffle_sync(number, 0)
