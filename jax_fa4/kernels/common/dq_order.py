"""The fixed order in which blocks add to dQ, so that its float32 sums come out the same in every run.

A query block is visited by a run of consecutive key tiles (less those that segments keep apart); they add in
descending order. Each adds after those behind it in the run, `turn` of them; a counter per query block says how many
are done.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4 import masks
from jax_fa4.kernels.common import segments
from jax_fa4.kernels.common.copies import address


@dataclasses.dataclass(frozen=True)
class Search:
    """How far a tile knows the last visitors: that of the query block `before`, the last one asked for."""

    last: Int32
    before: Int32


@dataclasses.dataclass(frozen=True)
class Order:
    """The turns of a key tile with the query blocks of its steps, asked for step by step, one of `tiles` of a head."""

    kernel: Any
    g: Any
    steps: Any
    tile: Any
    tiles: Int32

    def begin(self, place) -> Search:
        """Before the first step, which is at `place`."""
        return Search(self.tile.block, place.block)

    def turn(self, place, search: Search) -> tuple[cute.Pointer, Int32, Search]:
        """The counter of a step's query block, how many tiles come before, and the search for the next step's."""
        first_of_head = place.block <= search.before
        known = cutlass.select_(first_of_head, self.tile.block, search.last)
        last = last_visitor(self.kernel, self.steps.geometry, self.tiles, place.block, known)
        counter = address(self.g.dq_counter, self.tile.batch, place.head, place.block)
        return counter, turn(self.kernel, self.g, self.tile, place.block, last), Search(last, place.block)


@cute.jit
def last_visitor(kernel, geometry, tiles: Int32, block: Int32, known: Int32) -> Int32:
    """The last key tile that visits a query block, searched upwards from a `known` visitor."""
    plan, mask = kernel.plan, kernel.spec.mask
    last, more = known, known + 1 < tiles
    while more:
        start, _, _, end = masks.query_block_range(mask, last + 1, plan.block_q, plan.block_k, geometry)
        visits = (start <= block) & (block < end)
        last = cutlass.select_(visits, last + 1, last)
        more = visits & (last + 1 < tiles)
    return last


def turn(kernel, g, tile, block: Int32, last: Int32) -> Int32:
    """How many key tiles add to a query block before this one, if `last` is its last visitor; for a whole warp."""
    if not segments.in_mask(kernel.spec.mask):
        return last - tile.block
    ids = g.q_id_bounds[tile.batch, block, None]
    return segments.meeting(ids, g.kv_id_bounds[tile.batch, None, None], tile.block + 1, last + 1)


@cute.jit
def wait(counter: cute.Pointer, count: Int32):
    """Holds the warp until the counter has reached `count`; what was added before is then visible to it."""
    if cute.arch.lane_idx() == 0:
        done = Int32(-1)
        while done < count:
            done = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()
    cute.arch.fence_proxy("async")


@cute.jit
def release(counter: cute.Pointer):
    """Waits for this warp's bulk copies to be visible, then lets the next tile add."""
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
