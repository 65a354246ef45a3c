"""What leaves a consumer warpgroup: dQ of a step, and dK and dV of a finished tile."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from jax_fa4.kernels.common import softmax
from jax_fa4.kernels.sm90.bwd.pipes import Barrier

WARPGROUP_AND_WARP = 128 + 32


@cute.jit
def stage_dq(consumer, dq: cute.Tensor):
    """Hands this warpgroup's part of dQ to the store warp, in the order of its registers (`finish` undoes it)."""
    group = consumer.warpgroup
    cute.arch.barrier(barrier_id=Barrier.DQ_EMPTY + group, number_of_threads=WARPGROUP_AND_WARP)
    target = consumer.shared.dq[None, consumer.thread % 128, None, group]
    cute.autovec_copy(cute.make_tensor(dq.iterator, cute.make_layout(target.shape)), target)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + group, number_of_threads=WARPGROUP_AND_WARP)


@cute.jit
def run(consumer, tile):
    """Writes dV and dK of this warpgroup's 64 keys; dK gets the scale of the scores."""
    o, plan, kernel, shared = consumer.operands, consumer.plan, consumer.kernel, consumer.shared
    for i in cutlass.range_constexpr(cute.size(o.dk)):
        o.dk[i] = o.dk[i] * kernel.spec.scale
    if cutlass.const_expr(kernel.stage_outputs):
        everyone = 128 * plan.consumers
        cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=everyone)  # dS has been read by all
        _stage(consumer, o.dv, consumer.products.dv, shared.dv)
        cute.arch.barrier_arrive(barrier_id=Barrier.DV_FULL, number_of_threads=everyone + 32)
        group = consumer.warpgroup
        cute.arch.barrier(barrier_id=Barrier.DQ_EMPTY + group, number_of_threads=WARPGROUP_AND_WARP)
        # dK lies over all of dQ's memory, in rows of the tile, not by warpgroup
        cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=everyone)
        _stage(consumer, o.dk, consumer.products.dk, shared.dk)
        cute.arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + group, number_of_threads=WARPGROUP_AND_WARP)
    else:
        _write(consumer, o.dv, consumer.g.dv, tile)
        _write(consumer, o.dk, consumer.g.dk, tile)


def _stage(consumer, accumulator, product, target) -> None:
    """Rounds an accumulator of (keys, columns) into its tile in shared memory."""
    rounded = cute.make_rmem_tensor(accumulator.shape, consumer.kernel.dtype)
    softmax.convert_pairs(accumulator, rounded)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), consumer.kernel.dtype)
    copy = cute.make_tiled_copy_C(atom, product).get_slice(consumer.thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(target))
    cute.arch.fence_view_async_shared()


@cute.jit
def _write(consumer, accumulator: cute.Tensor, output: cute.Tensor, tile):
    """Writes float32 results from registers: neighbouring lanes hold 32 consecutive bytes of a row."""
    columns = output.shape[3]
    for row_step in cutlass.range_constexpr(2):
        key = tile.block * consumer.plan.block_k + consumer.key + 8 * row_step
        if key < output.shape[1]:
            row = output[tile.batch, key, tile.head, None]
            for i in cutlass.range_constexpr(-(-columns // 8)):
                pair = cute.make_tensor(
                    row.iterator + (8 * i + 2 * consumer.quad_lane), cute.make_layout((2,))
                )
                source = cute.make_tensor(accumulator.iterator + (4 * i + 2 * row_step), cute.make_layout((2,)))
                cute.autovec_copy(source, pair)
