"""Which work a CTA does, computed alike by every role.

CTAs that share their products (`plan.cta_group`) do the same work, each for its own rows of the query tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cutlass import Int32

from jax_fa4 import masks
from jax_fa4.kernels.common import segments, sequence
from jax_fa4.kernels.common.mask import NUMBERS
from jax_fa4.kernels.common.scheduler import TileSchedule
from jax_fa4.kernels.sm100 import visits
from jax_fa4.kernels.sm100.plans import BLOCK_K, ForwardPlan
from jax_fa4.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Work:
    """A CTA's current work.

    Attributes:
      first_tile: index of its first query tile (of `plan.q_rows` rows) among those of the query sequence.
      head: query head; under GQA packing KV head.
      kv_head, batch: indices.
      split: which part of the key blocks this is, under split-KV.
      geometry: of the example, for masks.
    """

    first_tile: Int32
    head: Int32
    kv_head: Int32
    batch: Int32
    split: Int32
    geometry: Any


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
        kv_head = tile.head // (spec.group // plan.packed_heads)
        return Work(first_tile, tile.head, kv_head, tile.batch, split, geometry)

    def visits(self, work: Work) -> tuple[visits.Visits, visits.Cursor]:
        """All key blocks in the ranges of the work's tiles, and the cursor before the first one."""
        tiles, start, end = visits.at_least_one(*self.ranges(work))
        none = Int32(0)
        return visits.Visits(tiles, end - start), visits.Cursor(end, end - start, (none, none), none)

    def ranges(self, work: Work) -> tuple[list[tuple], Int32]:
        """(start, full_start, full_end, end) of each tile without regard to ids, and where they end in all splits."""
        mask, plan = segments.without(self.spec.mask), self.plan
        tiles = [work.first_tile + i for i in range(plan.q_tiles)]
        ranges = [masks.block_range(mask, tile, plan.tile_positions, BLOCK_K, work.geometry) for tile in tiles]
        ranges = [tuple(Int32(edge) for edge in edges) for edges in ranges]
        beyond = NUMBERS.maximum(ranges[0][3], ranges[-1][3])
        return visits.part(ranges, work.split, self.splits) if plan.split_kv else ranges, beyond

    def id_blocks(self, work: Work) -> tuple[tuple[segments.SegmentBlocks, ...], Int32]:
        """For `groups.announce`: the blocks of each tile by ids, and where they end in all splits."""
        ranges, beyond = self.ranges(work)
        q_bounds, kv_bounds = (x[work.batch, None, None] for x in (self.g.q_id_bounds, self.g.kv_id_bounds))
        blocks = []
        for i, edges in enumerate(ranges):
            tile = NUMBERS.minimum(work.first_tile + i, q_bounds.shape[0] - 1)  # the last one may not exist
            blocks.append(segments.of_ids(q_bounds[tile, None], kv_bounds, edges))
        return tuple(blocks), beyond
