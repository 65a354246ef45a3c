"""Which tile a persistent CTA works on: the order of tiles, who hands them out, and how consumers hear of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_fa4.kernels.common import pipelines


@dataclasses.dataclass(frozen=True)
class Tile:
    """Work of one CTA: a block of query rows of one head of one example. A negative block ends the work."""

    q_block: Int32
    head: Int32
    batch: Int32


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
    """A tile and how many KV blocks it visits after the first one: with the element mask, then without."""

    tile: Tile
    masked_steps: Int32
    full_steps: Int32


WORK_WORDS = 5


def end_of_work() -> Work:
    """What follows the last tile."""
    return Work(Tile(Int32(-1), Int32(0), Int32(0)), Int32(0), Int32(0))


@dataclasses.dataclass(frozen=True)
class WorkQueue:
    """Announces work from the producer warp to the consumers: a ring of slots of `WORK_WORDS` words."""

    words: cute.Tensor
    ring: Any


def work_queue(barriers: cute.Pointer, words: cute.Tensor, consumer_warps: int) -> WorkQueue:
    """A queue with as many slots as `words` (WORK_WORDS, slots) has."""
    return WorkQueue(words, pipelines.thread_pipeline(barriers, cute.size(words, mode=[1]), 32, consumer_warps))


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
    queue.ring.producer_commit(state)
    state.advance()
    return state


@cute.jit
def receive(queue: WorkQueue, state):
    """The next work, for a consumer warp. Returns it and the next slot's state."""
    queue.ring.consumer_wait(state)
    words = tuple(queue.words[i, state.index] for i in range(WORK_WORDS))
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        queue.ring.consumer_release(state)
    state.advance()
    return Work(Tile(*words[:3]), *words[3:]), state
