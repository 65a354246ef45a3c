"""Scales and rounds dQ of sections of key tiles that are done, in spare warps, while later sections are worked on.

A section is done when all its tiles are counted; the store warp counts a tile when its additions are complete. Spare
warps draw shares of such a section, whose sums are in the L2 cache still. Nobody waits for them: what nobody has drawn
when blocks run out of tiles is left to the kernel afterwards (`finish`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from jax_fa4.kernels.common import abi, dq_zeros, key_tiles, last_wave, pipelines
from jax_fa4.kernels.common.copies import address
from jax_fa4.kernels.sm90.bwd import epilogue

NAP_NS = 1000
"""Between two looks whether a section is done."""


def scratch() -> tuple[abi.Buffer, ...]:
    """For each section, of which there are no more than heads: how many tiles are done, and how many shares drawn."""
    return abi.scratch("dq_done", "int32", ("B", "H")), abi.scratch("dq_drawn", "int32", ("B", "H"))


@dataclasses.dataclass(frozen=True)
class Sections:
    """The first `count` sections, those with all tiles and none of them cut, if any, and so many `shares` of each.

    A share is a consumer warpgroup's part of a tile of the accumulator; they are in its order.
    """

    count: Int32
    shares: Int32

    @classmethod
    def make(cls, schedule, plan, dims) -> Sections:
        row_blocks = (dims.S + (plan.block_q - 1)) // plan.block_q
        shares = schedule.section_heads * (dims.H // schedule.heads) * row_blocks * plan.dq_parts
        whole = schedule.whole if isinstance(schedule, last_wave.CutSchedule) else schedule.count
        count = whole // cutlass.max(dq_zeros.per_section(schedule), 1)
        if plan.rounded_rows is not None:
            count = Int32(cutlass.select_(dims.S > plan.rounded_rows, 0, count))
        return cls(count, shares)


@cute.jit
def count(g, section: Int32, later: cutlass.Constexpr[int]):
    """Counts a tile of a section, in the warp that added its dQ, as complete but for its `later` last bulk groups."""
    cute.arch.cp_async_bulk_wait_group(later)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.red(g.dq_done.iterator + section, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What a spare warp does while it has nothing else to do."""

    kernel: Any
    pipes: Any
    g: Any
    schedule: Any
    sections: Sections

    def until_number(self, turn: Int32, section: Int32, done: Boolean) -> tuple[Int32, Boolean]:
        """Rounds until the block's `turn`th tile number is there, or nothing is left.

        `section` is the one that the warp is at, `done` whether it knows that to be done: both are returned.
        """
        return _until_number(self, turn, section, done)


@cute.jit
def run(work, shared):
    """A warp that does nothing else."""
    number, turn, section, done = cute.arch.block_idx()[0], Int32(0), Int32(0), Boolean(False)
    while number < work.schedule.count:
        section, done = work.until_number(turn, section, done)
        number = key_tiles.receive(work.pipes, shared, turn)
        turn += 1


@cute.jit
def _until_number(work, turn: Int32, section: Int32, done: Boolean):
    state, sections = pipelines.buffer(turn, key_tiles.NUMBER_STAGES), work.sections
    while Boolean(section < sections.count) & ~pipelines.is_full(work.pipes.numbers, state):
        if not done:
            done = _is_done(work, section)
        if done:
            share = _draw(work.g, section)
            if share < sections.shares:
                _round(work, section * sections.shares + share)
            else:
                section, done = section + 1, Boolean(False)
        else:
            cute.arch.inline_ptx(f"nanosleep.u32 {NAP_NS};")
    return section, done


@cute.jit
def _is_done(work, section: Int32) -> Boolean:
    """Whether all tiles of a section are counted; what they added is then visible to this warp."""
    counter, tiles = work.g.dq_done.iterator + section, dq_zeros.per_section(work.schedule)
    counted = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")  # an acquire would empty the L1 cache
    if counted >= tiles:
        counted = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    return Boolean(cute.arch.make_warp_uniform(counted) >= tiles)


@cute.jit
def _draw(g, section: Int32) -> Int32:
    """The next share of a section."""
    share = Int32(0)
    if cute.arch.lane_idx() == 0:
        share = cute.arch.atomic_add(g.dq_drawn.iterator + section, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(share, 0)


@cute.jit
def _round(work, share: Int32):
    """A share, from the order of the threads that made it: 16 rows at a time, of which a lane has two."""
    plan, sums, dq, lane = work.kernel.plan, work.g.dq_accumulator, work.g.dq, cute.arch.lane_idx()
    _, heads, row_blocks, _ = sums.shape
    parts, width = plan.dq_parts, dq.element_type.width // 8
    tile, part = share // parts, share % parts
    number, row, column = tile // row_blocks, tile % row_blocks * plan.block_q + lane // 4, 0
    if cutlass.const_expr(plan.dq_by_rows):
        row += part * plan.part_rows
    else:
        column = part * plan.part_columns
    source = sums.iterator.toint() + Int64(share) * (4 * plan.part_floats) + 16 * lane
    target = address(dq, number // heads, row, number % heads, 0).toint() + column * width
    step, rows = heads * dq.shape[3] * (8 * width), dq.shape[1] - row
    columns = dq.shape[3] - column
    if cutlass.const_expr(work.kernel.spec.head_dim == plan.dq_columns):
        columns = plan.part_columns  # all there
    for _ in cutlass.range(plan.part_rows // 16, unroll=1):
        for half in cutlass.range_constexpr(2):
            for first in cutlass.range_constexpr(0, plan.part_columns, 32):
                # Half of what lies side by side, for lack of registers; the other half is then in the L1 cache.
                pairs = [_load(source, 2048 * (first // 8 + i) + 8 * half) for i in range(4)]
                values = [value * work.kernel.spec.scale for pair in pairs for value in pair]
                exists = Boolean(rows > 8 * half)
                epilogue.store_row(target + first * width, values, lane % 4, exists, columns - first, dq.element_type)
            target += step
        source += 512
        rows -= 16


def _load(source: Int64, offset: int) -> list[Float32]:
    """Two values, so many bytes after an address."""
    return cute.arch.inline_ptx(
        f"ld.global.v2.f32 {{{{$w0}}, {{$w1}}}}, [{{$r0}}+{offset}];",
        write_only_types=[Float32] * 2, read_only_args=[source],
    )  # fmt: skip
