"""The mma role: one warp issues both products, S = Q K^T into a score slot and O += P V."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from jax_fa4.kernels.sm100.context import Context, commit, probabilities, products, scores, tmem_fence
from jax_fa4.kernels.sm100.plans import SLOTS

# Of P's 128 columns this many are enough for the second product to start.
_HEAD_COLUMNS = 96


@cute.jit
def run(context: Context):
    if cutlass.const_expr(context.plan.q_tiles == 2):
        _two_tiles(context)
    else:
        _one_tile(context)


def _operands(context: Context):
    """Descriptors of Q, K, V in shared memory (last mode: tile or stage)."""
    shared = context.shared
    return (
        context.qk.make_fragment_A(shared.q),
        context.qk.make_fragment_B(shared.k),
        context.pv.make_fragment_B(shared.v),
    )


@cute.jit
def _score(context: Context, slot, q, k):
    """S of a slot = Q K^T."""
    qk = cute.make_tiled_mma(context.qk.op)  # its own: `set` changes the object
    accumulator = scores(context, slot)
    for i in cutlass.range_constexpr(cute.size(q, mode=[2])):
        qk.set(tcgen05.Field.ACCUMULATE, i != 0)
        cute.gemm(qk, accumulator, q[None, None, i], k[None, None, i], accumulator)
    commit(context.barriers.score_full, slot)


@cute.jit
def _output(context: Context, slot, tile, phase, v, accumulate):
    """O of a tile += P V with the slot's P; the products over P's tail wait for it apart."""
    pv, barriers = cute.make_tiled_mma(context.pv.op), context.barriers
    barriers.p_full.wait(slot, phase)
    tmem_fence("after")
    p = probabilities(context, slot)
    accumulator = products(context, tile)
    count = cute.size(p, mode=[2])
    head = count * _HEAD_COLUMNS // 128
    for i in cutlass.range_constexpr(count):
        if cutlass.const_expr(i == head):
            barriers.p_tail.wait(slot, phase)
            tmem_fence("after")
        pv.set(tcgen05.Field.ACCUMULATE, accumulate if cutlass.const_expr(i == 0) else True)
        cute.gemm(pv, accumulator, p[None, None, i], v[None, None, i], accumulator)


@cute.jit
def _two_tiles(context: Context):
    """Each query tile has its slot and its O; K and V are shared. Tile i's S of a block follows its O of the last one."""
    plan, barriers = context.plan, context.barriers
    q, k, v = _operands(context)
    kv_pipe, q_pipe = barriers.kv, barriers.q
    q_phase = Int32(0)
    kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, plan.kv_stages)
    phases = cute.make_rmem_tensor((2,), Int32)  # of p_full, by slot
    phases.fill(0)
    number = cute.arch.block_idx()[0]
    while number < context.work.count:
        work = context.work.at(number)
        for step in cutlass.range(work.count + 1, unroll=1):
            block = work.end - 1 - step
            v_state = kv_state.clone()
            if step > 0:
                kv_pipe.consumer_wait(v_state)
                kv_state.advance()
            for i in cutlass.range_constexpr(2):
                blocks = work.tiles[i]
                if blocks.has(block + 1):
                    _output(context, i, i, phases[i], v[None, None, None, v_state.index], block + 1 != blocks.end - 1)
                    phases[i] = phases[i] ^ 1
                    if block + 1 == blocks.start:
                        commit(barriers.o_full, i)
                if step < work.count:
                    if cutlass.const_expr(i == 0):
                        kv_pipe.consumer_wait(kv_state)
                    if step == 0:
                        barriers.q.sync_object_full.wait(i, q_phase)
                    if blocks.has(block):
                        _score(context, i, q[None, None, None, i], k[None, None, None, kv_state.index])
            if step > 0:
                kv_pipe.consumer_release(v_state)
            if step < work.count:
                kv_pipe.consumer_release(kv_state)
                kv_state.advance()
            if step == work.count - 1:
                for i in cutlass.range_constexpr(2):
                    commit(q_pipe.sync_object_empty, i)
        q_phase ^= 1
        number += cute.arch.grid_dim()[0]


@cute.jit
def _one_tile(context: Context):
    """Successive key blocks alternate between the score slots, and S of a block is issued before O of the last one."""
    plan, barriers = context.plan, context.barriers
    q, k, v = _operands(context)
    kv_pipe = barriers.kv
    q_phase, turn = Int32(0), Int32(0)
    kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, plan.kv_stages)
    number = cute.arch.block_idx()[0]
    while number < context.work.count:
        work = context.work.at(number)
        barriers.q.sync_object_full.wait(0, q_phase)
        for step in cutlass.range(work.count + 1, unroll=1):
            if step < work.count:
                kv_pipe.consumer_wait(kv_state)
                _score(context, turn % SLOTS, q[None, None, None, 0], k[None, None, None, kv_state.index])
                kv_pipe.consumer_release(kv_state)
                kv_state.advance()
                turn += 1
                if step == work.count - 1:
                    commit(barriers.q.sync_object_empty, 0)
            if step > 0:
                before = turn - 1 if step == work.count else turn - 2
                kv_pipe.consumer_wait(kv_state)
                _output(
                    context, before % SLOTS, 0, (before // SLOTS) % 2, v[None, None, None, kv_state.index], step > 1
                )
                commit(barriers.o_full, 0)
                kv_pipe.consumer_release(kv_state)
                kv_state.advance()
        q_phase ^= 1
        number += cute.arch.grid_dim()[0]
