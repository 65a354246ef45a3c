"""The load role: one warp brings Q, K and V tiles into shared memory by TMA."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.sm100 import dispatch
from jax_fa4.kernels.sm100.context import Context


@cute.jit
def run(context: Context):
    plan, memory, shared = context.plan, context.memory, context.shared
    qk, pv = context.qk.get_slice(context.rank), context.pv.get_slice(context.rank)
    s_q, g_q = _partition(memory.load_q, shared.q, qk.partition_A(cute.flat_divide(memory.q, context.q_tile)))
    s_k, g_k = _partition(memory.load_k, shared.k, qk.partition_B(cute.flat_divide(memory.k, context.k_tile)))
    s_v, g_v = _partition(memory.load_v, shared.v, pv.partition_B(cute.flat_divide(memory.v, context.v_tile)))
    q_pipe = context.barriers.q
    q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, plan.q_tiles)
    kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, plan.kv_stages)

    number, done, read = dispatch.first(context), Int32(0), Int32(0)
    while number < context.work.count:
        work = context.work.at(number)
        visits, cursor = context.visits(work, read)
        visit, cursor = visits.next(cursor)
        for i in cutlass.range_constexpr(plan.q_tiles):
            q_pipe.producer_acquire(q_state)
            cute.copy(
                memory.load_q,
                g_q[None, work.first_tile + i, 0, work.head, work.batch],
                s_q[None, q_state.index],
                tma_bar_ptr=q_pipe.producer_get_barrier(q_state),
            )
            q_state.advance()
            if cutlass.const_expr(i == 0):
                kv_state = _fetch(context, kv_state, "k", work, visit.block, g_k, s_k)
        # K and V in the order of the products: with one query tile, scores run a block ahead of the second product.
        for step in cutlass.range(1, visits.count + 1, unroll=1):
            block = visit.block
            if cutlass.const_expr(plan.q_tiles == 2):
                kv_state = _fetch(context, kv_state, "v", work, block, g_v, s_v)
            visit, cursor = visits.next(cursor)
            if step < visits.count:
                kv_state = _fetch(context, kv_state, "k", work, visit.block, g_k, s_k)
            if cutlass.const_expr(plan.q_tiles == 1):
                kv_state = _fetch(context, kv_state, "v", work, block, g_v, s_v)
        read = cursor.read
        number, done = dispatch.following(context, number, done)
    context.barriers.kv.producer_tail(kv_state)


def _partition(atom, shared, tiles):
    """Views with one mode per copy: shared [copy, stage], global [copy, tile coordinates, head, batch]."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
    )


@cute.jit
def _fetch(context: Context, state, which: cutlass.Constexpr, work, block, source, target):
    """Loads a key block of K or V, chunk by chunk, into the next stages of the ring; returns the ring's next state.

    Chunks divide what the product sums over: columns of K, keys of V.
    """
    pipe, memory, chunks = context.barriers.kv, context.memory, context.plan.kv_chunks
    is_k = which == "k"
    for chunk in cutlass.range_constexpr(chunks):
        at = (block, chunk) if cutlass.const_expr(is_k) else (0, block * chunks + chunk)
        pipe.producer_acquire(state, expected_tx=context.tx_bytes[which])
        cute.copy(
            memory.load_k if cutlass.const_expr(is_k) else memory.load_v,
            source[None, *at, work.kv_head, work.batch],
            target[None, state.index],
            tma_bar_ptr=pipe.producer_get_barrier(state),
        )
        state.advance()
    return state
