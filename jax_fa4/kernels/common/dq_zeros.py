"""Zeroes dQ's float32 sums of the heads of one section of key tiles while earlier sections are worked on.

A kernel beforehand (`prepare`) zeroes those of the first sections. The tiles of every section zero, a share each, those
of a section so far `ahead` that all multiprocessors together do not get there meanwhile, and count. Whoever adds, or
loads for those who add, looks whether all shares are done: they have been for long.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from jax_fa4.kernels.common import abi, key_tiles, last_wave

VECTOR = 4


def scratch() -> tuple[abi.Buffer, ...]:
    """For each section, of which there are no more than heads: how many shares of its sums are zeroed."""
    return (abi.scratch("dq_zeroed", "int32", ("B", "H")),)


@dataclasses.dataclass(frozen=True)
class Beforehand:
    """What is zeroed beforehand: sums of the first `heads` query heads, counted over all examples.

    So the counters of the first `sections` are set to `shares`, as if these were done.
    """

    heads: Int32
    sections: Int32
    shares: Int32

    @classmethod
    def make(cls, schedule, dims) -> Beforehand:
        sections = ahead(schedule, dims.sm_count)
        return cls(sections * schedule.section_heads * (dims.H // schedule.heads), sections, per_section(schedule))


def per_section(schedule) -> Int32:
    """Tiles of a section, and shares of the sums of another."""
    return schedule.section_heads * schedule.blocks


def section_of(schedule, tile) -> Int32:
    """The section of a tile."""
    return (tile.batch * schedule.heads + tile.head) // schedule.section_heads


@cute.jit
def ahead(schedule, workers: Int32) -> Int32:
    """How many sections a section is in front of the one whose sums its tiles zero; so many are zeroed beforehand.

    All, if tiles with a share would be cut into pieces.
    """
    sections = (schedule.heads * schedule.batch + (schedule.section_heads - 1)) // schedule.section_heads
    tiles = cutlass.max(per_section(schedule), 1)  # without keys there are none
    result = (workers + (tiles - 1)) // tiles + 1
    if cutlass.const_expr(isinstance(schedule, last_wave.CutSchedule)):
        if schedule.whole < (sections - result) * tiles:
            result = sections
    return result


@cute.jit
def run(kernel, shared, pipes, g, dims, schedule, rounding=None):
    """A warp: the shares of all tiles of this block. In between it does some of the work of `rounding`, if given."""
    sums, tiles, far = g.dq_accumulator, per_section(schedule), ahead(schedule, dims.sm_count)
    total = Int64(dims.B) * dims.H * sums.shape[2] * kernel.plan.dq_floats
    per_head = total // (schedule.heads * schedule.batch)
    section_floats = per_head * schedule.section_heads
    share = (per_head + (schedule.blocks * VECTOR - 1)) // (schedule.blocks * VECTOR) * VECTOR
    zeros = cute.make_rmem_tensor((VECTOR,), Float32)
    zeros.fill(0.0)
    lane, number, turn = cute.arch.lane_idx(), cute.arch.block_idx()[0], Int32(0)
    rounded, done = Int32(0), Boolean(False)
    while number < schedule.count:
        section = number // tiles
        begin = (section + far) * section_floats
        if begin < total:
            first = begin + (number - section * tiles) * share
            end = cutlass.min(cutlass.min(first + share, begin + section_floats), total)
            for i in cutlass.range(first + VECTOR * lane, end, 32 * VECTOR, unroll=1):
                cute.autovec_copy(zeros, cute.make_tensor((sums.iterator + i).align(16), zeros.layout))
            cute.arch.sync_warp()
            if lane == 0:
                counter = g.dq_zeroed.iterator + (section + far)
                cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
        if cutlass.const_expr(rounding is not None):
            rounded, done = rounding.until_number(turn, rounded, done)
        number = key_tiles.receive(pipes, shared, turn)
        turn += 1


@cute.jit
def wait(g, schedule, tile):
    """Holds a warp until the sums that a tile adds to are zeroed."""
    section = section_of(schedule, tile)
    while _zeroed(g, section) < per_section(schedule):
        pass
    cute.arch.fence_proxy("async")


@cute.jit
def _zeroed(g, section: Int32) -> Int32:
    """How many shares of a section's sums are zeroed, and visible to this warp."""
    return cute.arch.load(g.dq_zeroed.iterator + section, Int32, sem="acquire", scope="gpu")
