"""The store warp: adds each step's dQ to the accumulator in global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from jax_fa4.kernels.common import dq_order, dq_zeros, key_tiles
from jax_fa4.kernels.common.copies import address, reduce_add
from jax_fa4.kernels.sm90.bwd import keys, rounding
from jax_fa4.kernels.sm90.bwd.pipes import WARPGROUP_AND_WARP, Barrier


def drop_dq(parts: int) -> None:
    """Takes what consumers that carry dQ from tile to tile hand over in their first step when none is carried."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    for part in range(parts):
        cute.arch.barrier_arrive(barrier_id=Barrier.DQ_EMPTY + part, number_of_threads=WARPGROUP_AND_WARP)
    for part in range(parts):
        cute.arch.barrier(barrier_id=Barrier.DQ_FULL + part, number_of_threads=WARPGROUP_AND_WARP)


@cute.jit
def run(kernel, shared, pipes, g, dims, key_schedule):
    """All tiles of this block. Every lane commits and waits, so that bulk groups count the same in each."""
    plan, spec = kernel.plan, kernel.spec
    lane, parts = cute.arch.lane_idx(), plan.consumers
    number, turn = cute.arch.block_idx()[0], Int32(0)
    fresh = Boolean(True)  # see `consumer.Work`
    before = Int32(-1)  # the section of the tile before, which is still to be counted as done
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        heads = keys.heads_of(kernel, tile)
        steps = key_tiles.steps(kernel, g, dims, tile)
        count = steps.count(heads)
        place = key_tiles.nowhere()
        if count > 0:
            if cutlass.const_expr(plan.carries_dq):
                if fresh:
                    drop_dq(parts)
            fresh = Boolean(False)
            place = key_tiles.first(steps, tile.head * heads, heads)
        else:
            fresh = Boolean(True)
        order = dq_order.Order(kernel, g, steps, tile, key_schedule.blocks)
        search = order.begin(place)
        for step in cutlass.range(count, unroll=1):
            target = address(g.dq_accumulator, tile.batch, place.head, place.block, 0)
            for part in cutlass.range_constexpr(parts - 1, -1, -1):  # in the order in which warpgroups take turns
                cute.arch.cp_async_bulk_wait_group(part, read=True)
                cute.arch.barrier_arrive(barrier_id=Barrier.DQ_EMPTY + part, number_of_threads=WARPGROUP_AND_WARP)
            if cutlass.const_expr(plan.zeroes_ahead):
                if step == 0:  # here, as the buffer is given back: before it costs 5 %
                    dq_zeros.wait(g, key_schedule, tile)
            if cutlass.const_expr(plan.rounds_behind):
                if (before >= 0) & (step == cutlass.min(1, count - 1)):  # by now its additions should be complete
                    if step == 0:
                        rounding.count(g, before, 0)
                    else:
                        rounding.count(g, before, parts)
            if cutlass.const_expr(spec.deterministic):
                counter, others, search = order.turn(place, search)
                dq_order.wait(counter, others)
            for part in cutlass.range_constexpr(parts - 1, -1, -1):
                cute.arch.barrier(barrier_id=Barrier.DQ_FULL + part, number_of_threads=WARPGROUP_AND_WARP)
                if lane == 0:
                    source = shared.dq[None, None, None, part].iterator
                    reduce_add(source, target + part * plan.part_floats, 4 * plan.part_floats)
                cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(spec.deterministic):
                dq_order.release(counter)
            place = key_tiles.following(steps, place)
        if cutlass.const_expr(plan.rounds_behind):
            if (before >= 0) & (count == 0):
                rounding.count(g, before, 0)
            before = dq_zeros.section_of(key_schedule, tile)
        number = key_tiles.receive(pipes, shared, turn)
        turn += 1
    if cutlass.const_expr(plan.rounds_behind):
        if before >= 0:
            rounding.count(g, before, 0)
    cute.arch.cp_async_bulk_wait_group(0, read=True)
