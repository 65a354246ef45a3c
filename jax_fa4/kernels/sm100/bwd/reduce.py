"""The reduce role: one warpgroup adds dQ of every step to the float32 accumulator in global memory.

A thread takes its lane of dQ out of tensor memory, some chunks at once, and hands it over chunk by chunk through shared
memory to asynchronous bulk reductions. The CTAs of a pair have half of the queries each.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.common import dq_order, key_tiles
from jax_fa4.kernels.common.copies import address, reduce_add
from jax_fa4.kernels.sm100.bwd import context as contexts
from jax_fa4.kernels.sm100.bwd.barriers import REDUCE_BARRIER, phase, report
from jax_fa4.kernels.sm100.bwd.context import Context
from jax_fa4.kernels.sm100.bwd.memory import load_columns
from jax_fa4.kernels.sm100.bwd.plan import BLOCK
from jax_fa4.kernels.sm100.context import tmem_fence

# More would take registers that the compute role can use better.
_COLUMNS_IN_REGISTERS = 64


@cute.jit
def run(context: Context):
    """All tiles of this block."""
    kernel, key_schedule, spec, g = context.kernel, context.schedule, context.spec, context.g
    plan = context.plan
    number, turn, steps_done = contexts.first_number(plan), Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = context.steps(tile)
        count = steps.count(spec.group)
        place = key_tiles.nowhere()
        if count > 0:
            place = key_tiles.first(steps, tile.head * spec.group)
        order = dq_order.Order(kernel, g, steps, tile, key_schedule.blocks)
        search = order.begin(place)
        for i in cutlass.range(count, unroll=1):
            counter, turns = None, Int32(0)
            if cutlass.const_expr(spec.deterministic):
                counter, turns, search = order.turn(place, search)
                turns *= plan.ctas  # the CTAs of a pair count together: each waits for both of every pair before
            share = context.rank * (plan.dq_floats // plan.ctas)
            target = address(g.dq_accumulator, tile.batch, place.head, place.block, 0) + share
            _step(context, steps_done + i, target, counter, turns)
            place = key_tiles.following(steps, place)
        steps_done += count
        number = contexts.receive(context, turn)
        turn += 1
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _step(context: Context, number, target, counter, turns):
    """Adds a step's dQ at `target`; with a `counter`, when it has reached `turns`."""
    plan, pipes, width, stages = context.plan, context.pipes, context.plan.dq_chunk, context.plan.dq_stages
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    thread = cute.arch.thread_idx()[0]
    pipes.dq_full.wait(0, phase(number))
    tmem_fence("after")
    chunks, at_once = plan.tmem.dq_columns // width, _COLUMNS_IN_REGISTERS // width
    values = None
    for i in cutlass.range_constexpr(chunks):
        if cutlass.const_expr(i % at_once == 0):
            columns = min(at_once, chunks - i) * width
            values = load_columns(context.tmem, plan.tmem.dq + i * width, columns, warp)
            if cutlass.const_expr(i + at_once >= chunks):
                tmem_fence("before")
                report(plan, pipes.dq_empty)
        stage = i % stages
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(stages - 1, read=True)
        cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=BLOCK)
        for j in cutlass.range_constexpr(width // 4):
            source = cute.make_tensor(values.iterator + i % at_once * width + 4 * j, cute.make_layout(4))
            cute.autovec_copy(source, context.shared.dq[None, thread, j, stage])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=BLOCK)
        if warp == 0:
            if cutlass.const_expr(counter is not None and i == 0):
                dq_order.wait(counter, turns)
            if cute.arch.lane_idx() == 0:
                floats = BLOCK * width
                reduce_add(context.shared.dq[None, None, None, stage].iterator, target + i * floats, 4 * floats)
            cute.arch.cp_async_bulk_commit_group()
    if cutlass.const_expr(counter is not None):
        if warp == 0:
            dq_order.release(counter)


def accumulator_layout(plan) -> cute.Layout:
    """Where element (query, column) of a tile of dQ lies in the accumulator, as `_step` writes it.

    (4, lane, vector of columns) for each CTA; in a pair a query has two lanes, with half of the columns each.
    """
    lane = 4
    if not plan.paired:
        return cute.make_layout((BLOCK, (4, plan.tile_d // 4)), stride=(lane, (1, lane * BLOCK)))
    half, vectors = BLOCK // 2, plan.tile_d // 8
    return cute.make_layout(
        ((half, 2), (4, vectors, 2)), stride=((lane, plan.dq_floats // 2), (1, lane * BLOCK, lane * half))
    )
