"""Which tile a persistent CTA works on: static schedules, the same arithmetic in every warp role."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


@dataclasses.dataclass(frozen=True)
class Tile:
    """Work of one CTA: a block of query rows of one head of one example."""

    q_block: Int32
    head: Int32
    batch: Int32


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """Tile numbers 0, 1, 2, ... in the order in which they are to start, dealt to n CTAs one round after the other.

    Every other round is dealt in reverse, so that no CTA gets the longer tile of every round.

    Heads are taken in sections. Within a section the last query blocks of all its heads come first: under a causal mask
    these are the longest, so the work left at the end is short and evens out. A section holds as many heads as keep
    their K and V in the L2 cache together; a section of one head keeps the natural order.

    Fields: numbers of query blocks, heads and examples, and heads per section.
    """

    q_blocks: Int32
    heads: Int32
    batch: Int32
    section_heads: Int32

    @property
    def count(self) -> Int32:
        return self.q_blocks * self.heads * self.batch

    def number(self, turn: Int32) -> Int32:
        """The number of this CTA's tile in a round."""
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        return turn * ctas + cutlass.select_(turn % 2 == 0, cta, ctas - 1 - cta)

    def tile(self, number: Int32) -> Tile:
        """The tile with this number."""
        per_section = self.section_heads * self.q_blocks
        section = number // per_section
        within = number - section * per_section
        first = section * self.section_heads
        width = cutlass.min(self.section_heads, self.heads * self.batch - first)
        step = within // width
        head = first + within - step * width
        batch = head // self.heads
        return Tile(self.q_blocks - 1 - step, head - batch * self.heads, batch)


def section_heads(longest_first: bool, group: int, kv_bytes_per_head, l2_bytes: int) -> Int32:
    """Heads per section: KV heads whose K and V fit in `l2_bytes` together, times the query heads that share one."""
    if not longest_first:
        return Int32(1)
    kv_heads = Int32(cutlass.max(Int64(l2_bytes) // Int64(kv_bytes_per_head), Int64(1)))
    return Int32(group) * kv_heads
