"""The epilogue role: one warp stores finished O tiles from shared to global memory by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.sm100 import dispatch
from jax_fa4.kernels.sm100.context import Context, block_of
from jax_fa4.kernels.sm100.plans import BLOCK_Q


@cute.jit
def run(context: Context):
    plan, memory, barriers = context.plan, context.memory, context.barriers
    tiles = cute.flat_divide(memory.o, (BLOCK_Q, plan.value_head_dim))
    s_o, g_o = cpasync.tma_partition(
        memory.store_o,
        0,
        cute.make_layout(1),
        cute.group_modes(context.shared.o, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    # Shared memory is free again once the store has read it: for the next O, or, where they share it, for the next Q.
    empty = barriers.q.sync_object_empty if plan.o_over_q else barriers.o_store_empty
    phase = Int32(0)
    number, done = dispatch.first(context), Int32(0)
    while number < context.work.count:
        work = context.work.at(number)
        for tile in cutlass.range_constexpr(plan.q_tiles):
            barriers.o_store_full.wait(tile, phase)
            target = g_o[None, block_of(context, work, tile), 0, work.head, work.batch]
            cute.copy(memory.store_o, s_o[None, tile], target)
            cute.arch.cp_async_bulk_commit_group()
        for tile in cutlass.range_constexpr(plan.q_tiles):
            cute.arch.cp_async_bulk_wait_group(plan.q_tiles - 1 - tile, read=True)
            _release(empty, tile)
        phase ^= 1
        number, done = dispatch.following(context, number, done)


def _release(barrier, tile: int) -> None:
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier.get_barrier(tile))
