"""Which tile a persistent CTA works on: the order of tiles, who hands them out, and how consumers hear of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from jax_fa4.kernels.common import pipelines
from jax_fa4.kernels.common.planning import MOST_MULTIPROCESSORS, Cutting


@dataclasses.dataclass(frozen=True)
class Tile:
    """Work of one CTA: a block of query rows of one head of one example. A negative block ends the work."""

    q_block: Int32
    head: Int32
    batch: Int32


@dataclasses.dataclass(frozen=True)
class Part:
    """Of a tile's KV blocks those from `start` to `end`, in units of which the tile has `units`."""

    start: Int32
    end: Int32
    units: Int32


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a CTA works on: a tile; if tiles may be cut, a part of it, and the slot where its partial result goes,
    negative if it is whole."""

    tile: Tile
    part: Part | None = None
    slot: Int32 | None = None


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """Tile numbers 0, 1, 2, ... in the order in which they are to start; the first of a CTA is its own index.

    Heads are taken in sections. Within a section the last query blocks of all its heads come first: under a causal mask
    these are the longest, so the work left at the end is short and evens out. A section holds as many heads as keep
    their K and V in the L2 cache together; the last one takes also what is left over, since a short section would end
    unevenly. A section of one head keeps the natural order.

    Fields: numbers of query blocks, heads and examples, and heads per section.
    """

    q_blocks: Int32
    heads: Int32
    batch: Int32
    section_heads: Int32

    @property
    def count(self) -> Int32:
        return self.q_blocks * self.heads * self.batch

    def tile(self, number: Int32) -> Tile:
        """The tile with this number; past the last one, the end of the work."""
        heads = self.heads * self.batch
        last = cutlass.max(heads // self.section_heads, Int32(1)) - 1
        section = cutlass.min(number // (self.section_heads * self.q_blocks), last)
        first = section * self.section_heads
        width = Int32(cutlass.select_(section == last, heads - first, self.section_heads))
        within = number - first * self.q_blocks
        step = within // width
        head = first + within - step * width
        batch = head // self.heads
        q_block = Int32(cutlass.select_(number < self.count, self.q_blocks - 1 - step, Int32(-1)))
        return Tile(q_block, head - batch * self.heads, batch)


@dataclasses.dataclass(frozen=True)
class CountedSchedule(TileSchedule):
    """Tiles that a counter hands out as CTAs ask for them, or in turn if there are at most `static_count`."""

    static_count: Int32

    @property
    def is_static(self):
        return self.count <= self.static_count

    @property
    def numbers(self) -> Int32:
        """What is handed out: tiles."""
        return self.count

    def begin(self, number: Int32) -> Any:
        """The position of a CTA at the start of what has this number."""
        return number

    def is_left(self, position: Any) -> Boolean:
        """Whether there is work at a position."""
        return position < self.count

    def piece(self, position: Any) -> Piece:
        """The work at a position."""
        return Piece(self.tile(position))

    def following(self, position: Any, counter: cute.Tensor) -> Any:
        """The position after this one for this CTA (see `next_number`)."""
        return next_number(self, position, counter)


MOST_PIECES = 2 * MOST_MULTIPROCESSORS
"""Shares, and tiles among them: each tile's end cuts a share in two at the most."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a CTA is: the number of its tile or share, and how far along the line of shares."""

    number: Int32
    at: Int32


@dataclasses.dataclass(frozen=True)
class SharedSchedule(CountedSchedule):
    """As many tiles as fill the device evenly are whole; the KV blocks of the others are shared out.

    Their blocks form a line, tile after tile, and it is cut into shares of equal length, one for each CTA, after the
    numbers of the whole tiles. A share that reaches past the end of a tile goes on in the next one: it is not longer
    than a tile, so it consists of one piece or two. All of it is arithmetic, so a tile has the same pieces in each run.

    Fields: tiles that stay whole, KV blocks of a tile (of the longest one: others are cut in proportion), KV blocks of
    a share, and shares.
    """

    whole: Int32
    tile_blocks: Int32
    share_blocks: Int32
    shares: Int32

    @property
    def numbers(self) -> Int32:
        """Whole tiles and shares."""
        return self.whole + self.shares

    @property
    def cut(self) -> Int32:
        """Tiles that are cut."""
        return self.count - self.whole

    def _start(self, number: Int32) -> Int32:
        return (number - self.whole) * self.share_blocks

    def _end(self, number: Int32) -> Int32:
        return cutlass.min(self._start(number + 1), self.cut * self.tile_blocks)

    def begin(self, number: Int32) -> Position:
        return Position(number, self._start(number))

    def is_left(self, position: Position) -> Boolean:
        return position.number < self.numbers

    @cute.jit
    def piece(self, position: Position):
        number, start, end, units, slot = position.number, Int32(0), Int32(1), Int32(1), Int32(-1)
        if position.number >= self.whole:
            index = position.at // self.tile_blocks
            start = position.at - index * self.tile_blocks
            units = self.tile_blocks
            end = cutlass.min(self._end(position.number) - index * units, units)
            slot = position.number - self.whole + index
            number = self.whole + index
        return Piece(self.tile(number), Part(start, end, units), slot)

    @cute.jit
    def following(self, position: Position, counter: cute.Tensor):
        number, at = position.number, position.at
        ends = Boolean(True)
        if number >= self.whole:  # the share may go on in the next tile
            at = (at // self.tile_blocks + 1) * self.tile_blocks
            ends = at >= self._end(number)
        if ends:
            number = next_number(self, number, counter)
            at = self._start(number)
        return Position(number, at)

    def slots(self, index: Int32) -> tuple[Int32, Int32]:
        """(first slot, slots) of the partial results of cut tile `index`."""
        start = index * self.tile_blocks
        first, last = start // self.share_blocks, (start + self.tile_blocks - 1) // self.share_blocks
        return index + first, last - first + 1


def share_out(tiles: CountedSchedule, tile_blocks: Int32, ctas: Int32, rule: Cutting, equal: Any) -> SharedSchedule:
    """The schedule in which the tiles of the last, unfilled wave are cut, if that saves enough.

    `tile_blocks`: KV blocks of the longest tile; `equal`: whether all have about as many. If not, only what does not
    fill one wave is cut: in more than one they are handed out longest first, and end evenly.
    """
    leftover = cutlass.select_(Boolean(equal) | (tiles.count < ctas), tiles.count % ctas, Int32(0))
    all_blocks = Int64(tile_blocks) * (tiles.count // ctas + 1)
    small = tile_blocks < 1 << 16  # products of two numbers of blocks stay within 32 bits
    blocks = cutlass.select_(small, leftover * tile_blocks, Int32(0))
    shares = cutlass.min(ctas, Int32(MOST_MULTIPROCESSORS))
    share_blocks = cutlass.max(cute.ceil_div(blocks, shares), Int32(rule.least_blocks))
    saved = tile_blocks - share_blocks
    enough = (saved >= rule.gain_blocks) & (Int64(saved) * 100 >= all_blocks * rule.gain_percent)
    leftover = Int32(cutlass.select_(small & enough, leftover, Int32(0)))
    return SharedSchedule(
        tiles.q_blocks, tiles.heads, tiles.batch, tiles.section_heads, tiles.static_count, tiles.count - leftover,
        tile_blocks, share_blocks, cute.ceil_div(leftover * tile_blocks, share_blocks),
    )  # fmt: skip


def section_heads(longest_first: bool, group: int, kv_bytes_per_head, l2_bytes: int) -> Int32:
    """Heads per section: KV heads whose K and V fit in `l2_bytes` together, times the query heads that share one."""
    if not longest_first:
        return Int32(1)
    kv_heads = Int32(cutlass.max(Int64(l2_bytes) // Int64(kv_bytes_per_head), Int64(1)))
    return Int32(group) * kv_heads


@cute.kernel
def reset(counter: cute.Tensor):
    """Zeroes the counter that hands out tiles."""
    counter[0] = Int32(0)


@cute.jit
def launch_reset(schedule: CountedSchedule, counter: cute.Tensor, stream):
    """Launches `reset`, if the counter is used."""
    if not schedule.is_static:
        _launch_reset(counter, stream)


def _launch_reset(counter: cute.Tensor, stream) -> None:
    reset(counter).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def next_number(schedule: CountedSchedule, number: Int32, counter: cute.Tensor):
    """The tile after `number` for this CTA: the next in turn, or by the counter (zero at launch) that nobody has yet.

    Called by all lanes of one warp; all get the same answer.
    """
    ctas = cute.arch.grid_dim()[0]
    following = number + ctas
    if not schedule.is_static:
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        following = ctas + cute.arch.shuffle_sync(taken, 0)
    return following


@dataclasses.dataclass(frozen=True)
class Work:
    """A tile and how many KV blocks it visits after the first one: with the element mask, then without. Where tiles
    may be cut, the slot of a piece (see `Piece`)."""

    tile: Tile
    masked_steps: Int32
    full_steps: Int32
    slot: Int32 | None = None


WORK_WORDS = 5
"""Of a slot of the queue; another one where tiles may be cut."""


def end_of_work() -> Work:
    """What follows the last tile."""
    return Work(Tile(Int32(-1), Int32(0), Int32(0)), Int32(0), Int32(0))


@dataclasses.dataclass(frozen=True)
class WorkQueue:
    """Announces work from the producer warp to the consumers: a ring of slots of `WORK_WORDS` words or one more."""

    words: cute.Tensor
    ring: Any


def work_queue(barriers: cute.Pointer, words: cute.Tensor, consumer_warps: int) -> WorkQueue:
    """A queue with as many slots as `words` (words of a slot, slots) has."""
    return WorkQueue(words, pipelines.thread_pipeline(barriers, cute.size(words, mode=[1]), 32, 32 * consumer_warps))


@cute.jit
def announce(queue: WorkQueue, state, work: Work):
    """Tells the consumers; called by the whole producer warp. Returns the next slot's state."""
    queue.ring.producer_acquire(state)
    if cute.arch.lane_idx() == 0:
        queue.words[0, state.index] = work.tile.q_block
        queue.words[1, state.index] = work.tile.head
        queue.words[2, state.index] = work.tile.batch
        queue.words[3, state.index] = work.masked_steps
        queue.words[4, state.index] = work.full_steps
        if cutlass.const_expr(work.slot is not None):
            queue.words[5, state.index] = work.slot
    queue.ring.producer_commit(state)
    state.advance()
    return state


@cute.jit
def receive(queue: WorkQueue, state):
    """The next work, for a consumer warp. Returns it and the next slot's state."""
    queue.ring.consumer_wait(state)
    words = tuple(queue.words[i, state.index] for i in range(cute.size(queue.words, mode=[0])))
    queue.ring.consumer_release(state)  # each lane, as each has read
    state.advance()
    return Work(Tile(*words[:3]), *words[3:]), state
