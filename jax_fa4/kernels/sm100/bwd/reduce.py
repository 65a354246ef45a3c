"""The reduce role: one warpgroup adds dQ of every step to the float32 accumulator in global memory.

A thread takes its row of dQ out of tensor memory, 64 columns at once, and hands it over in chunks of 32 columns through
shared memory to asynchronous bulk reductions.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.common import dq_order, key_tiles
from jax_fa4.kernels.common.copies import address, reduce_add
from jax_fa4.kernels.sm100.bwd.context import REDUCE_BARRIER, Context, load_columns, phase
from jax_fa4.kernels.sm100.bwd.plan import BLOCK, DQ_CHUNK, DQ_STAGES
from jax_fa4.kernels.sm100.context import arrive_warp, tmem_fence

# More would take registers that the compute role can use better.
_CHUNKS_IN_REGISTERS = 2


@cute.jit
def run(context: Context):
    """All tiles of this block."""
    kernel, key_schedule, spec, g = context.kernel, context.schedule, context.spec, context.g
    number, turn, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = key_tiles.steps(kernel, g, context.dims, tile)
        count = steps.count(spec.group)
        place = key_tiles.nowhere()
        if count > 0:
            place = key_tiles.first(steps, tile.head * spec.group)
        last, before = tile.block, place.block
        for i in cutlass.range(count, unroll=1):
            counter, turns = None, Int32(0)
            if cutlass.const_expr(spec.deterministic):
                last = cutlass.select_(place.block <= before, tile.block, last)  # the first of a head
                before = place.block
                last = dq_order.last_visitor(kernel, steps.geometry, key_schedule.blocks, place.block, last)
                counter = address(g.dq_counter, tile.batch, place.head, place.block)
                turns = dq_order.turn(kernel, g, tile, place.block, last)
            target = address(g.dq_accumulator, tile.batch, place.head, place.block, 0)
            _step(context, steps_done + i, target, counter, turns)
            place = key_tiles.following(steps, place)
        steps_done += count
        number = key_tiles.receive(context.pipes, context.shared, turn)
        turn += 1
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _step(context: Context, number, target, counter, turns):
    """Adds a step's dQ at `target`; with a `counter`, after `turns` other tiles have added theirs."""
    plan, pipes = context.plan, context.pipes
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    thread = cute.arch.thread_idx()[0]
    pipes.dq_full.wait(0, phase(number))
    tmem_fence("after")
    chunks = plan.tile_d // DQ_CHUNK
    values: list = []
    for i in cutlass.range_constexpr(chunks):
        if cutlass.const_expr(i % _CHUNKS_IN_REGISTERS == 0):
            values = _load(context, range(i, min(i + _CHUNKS_IN_REGISTERS, chunks)), thread)
            if cutlass.const_expr(i + _CHUNKS_IN_REGISTERS >= chunks):
                arrive_warp(pipes.dq_empty, 0)
        stage = i % DQ_STAGES
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(DQ_STAGES - 1, read=True)
        cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=BLOCK)
        chunk = values[i % _CHUNKS_IN_REGISTERS]
        for j in cutlass.range_constexpr(DQ_CHUNK // 4):
            source = cute.make_tensor(chunk.iterator + 4 * j, cute.make_layout(4))
            cute.autovec_copy(source, context.shared.dq[None, thread, j, stage])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=BLOCK)
        if warp == 0:
            if cutlass.const_expr(counter is not None and i == 0):
                dq_order.wait(counter, turns)
            if cute.arch.lane_idx() == 0:
                floats = BLOCK * DQ_CHUNK
                reduce_add(context.shared.dq[None, None, None, stage].iterator, target + i * floats, 4 * floats)
            cute.arch.cp_async_bulk_commit_group()
    if cutlass.const_expr(counter is not None):
        if warp == 0:
            dq_order.release(counter)


def _load(context: Context, chunks: range, thread) -> list:
    """A thread's row of some chunks of dQ."""
    values = [load_columns(context, context.plan.tmem.dq + i * DQ_CHUNK, DQ_CHUNK, thread) for i in chunks]
    cute.arch.fence_view_async_tmem_load()
    tmem_fence("before")
    return values
