"""The mma role: one warp issues both products, S = Q K^T into a score slot and O += P V."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from jax_fa4.kernels.sm100 import dispatch
from jax_fa4.kernels.sm100.context import Context, commit, probabilities, products, scores, tmem_fence
from jax_fa4.kernels.sm100.plans import SLOTS
from jax_fa4.kernels.sm100.visits import nowhere

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
def _score(context: Context, slot, q, k, state, own_ring: cutlass.Constexpr):
    """S of a slot = Q K^T; returns the ring's state after K. With `own_ring` it waits for K's chunks and frees them."""
    qk, kv = cute.make_tiled_mma(context.qk.op), context.barriers.kv  # a product of its own: `set` changes it
    accumulator = scores(context, slot)
    state = state.clone()
    count = cute.size(k, mode=[2])
    for chunk in cutlass.range_constexpr(context.plan.kv_chunks):
        if cutlass.const_expr(own_ring):
            kv.consumer_wait(state)
        for i in cutlass.range_constexpr(count):
            qk.set(tcgen05.Field.ACCUMULATE, chunk + i != 0)
            cute.gemm(
                qk, accumulator, q[None, None, chunk * count + i], k[None, None, i, state.index], accumulator
            )
        if cutlass.const_expr(own_ring):
            kv.consumer_release(state)
        state.advance()
    commit(context.barriers.score_full, slot, context.plan.cta_group)
    return state


@cute.jit
def _output(context: Context, place, v, state, accumulate, own_ring: cutlass.Constexpr):
    """O of a tile += P V with a slot's P; `place` is (slot, tile, phase). Products over P's tail wait for it apart."""
    slot, tile, phase = place
    pv, barriers = cute.make_tiled_mma(context.pv.op), context.barriers
    p, accumulator = probabilities(context, slot), products(context, tile)
    state = state.clone()
    count = cute.size(v, mode=[2])
    tail = context.plan.kv_chunks * count * _HEAD_COLUMNS // 128
    barriers.p_full.wait(slot, phase)
    tmem_fence("after")
    for chunk in cutlass.range_constexpr(context.plan.kv_chunks):
        if cutlass.const_expr(own_ring):
            barriers.kv.consumer_wait(state)
        for i in cutlass.range_constexpr(count):
            step = chunk * count + i
            if cutlass.const_expr(step == tail):
                barriers.p_tail.wait(slot, phase)
                tmem_fence("after")
            pv.set(tcgen05.Field.ACCUMULATE, accumulate if cutlass.const_expr(step == 0) else True)
            cute.gemm(pv, accumulator, p[None, None, step], v[None, None, i, state.index], accumulator)
        if cutlass.const_expr(own_ring):
            barriers.kv.consumer_release(state)
        state.advance()
    return state


@cute.jit
def _await_chunks(context: Context, state):
    """Waits for all chunks of a tile of K or V; returns the ring's state after them."""
    state = state.clone()
    for _ in cutlass.range_constexpr(context.plan.kv_chunks):
        context.barriers.kv.consumer_wait(state)
        state.advance()
    return state


@cute.jit
def _release_chunks(context: Context, state):
    """Frees all chunks of a tile of K or V once the products issued so far are done."""
    state = state.clone()
    for _ in cutlass.range_constexpr(context.plan.kv_chunks):
        context.barriers.kv.consumer_release(state)
        state.advance()


@cute.jit
def _two_tiles(context: Context):
    """Each query tile has its slot and its O, K and V are shared. A tile's S of a block follows its O of the last."""
    plan, barriers = context.plan, context.barriers
    q, k, v = _operands(context)
    q_phase = Int32(0)
    ring = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, plan.kv_stages)
    phases = cute.make_rmem_tensor((2,), Int32)  # of p_full, by slot
    phases.fill(0)
    number, done, read = dispatch.first(context), Int32(0), Int32(0)
    while number < context.work.count:
        visits, cursor = context.visits(context.work.at(number), read)
        visit = nowhere()
        for step in cutlass.range(visits.count + 1, unroll=1):
            previous = visit
            visit, cursor = visits.next(cursor)
            v_state = ring.clone()
            if step > 0:
                ring = _await_chunks(context, v_state)
            k_state = ring.clone()
            for i in cutlass.range_constexpr(2):
                blocks = visits.tiles[i]
                if visits.has(i, previous):
                    _output(context, (i, i, phases[i]), v, v_state, previous.block != blocks.end - 1, False)
                    phases[i] = phases[i] ^ 1
                    if previous.block == blocks.start:
                        commit(barriers.o_full, i, plan.cta_group)
                if cutlass.const_expr(i == 1):  # before the last scores: the load of the next K waits for it
                    if step > 0:
                        _release_chunks(context, v_state)
                if step < visits.count:
                    if cutlass.const_expr(i == 0):
                        ring = _await_chunks(context, k_state)
                    if step == 0:
                        barriers.q.sync_object_full.wait(i, q_phase)
                    if visits.has(i, visit):
                        _score(context, i, q[None, None, None, i], k, k_state, False)
            if step < visits.count:
                _release_chunks(context, k_state)
            if step == visits.count - 1:
                for i in cutlass.range_constexpr(2):
                    commit(barriers.q.sync_object_empty, i, plan.cta_group)
        q_phase ^= 1
        read = cursor.read
        number, done = dispatch.following(context, number, done)


@cute.jit
def _one_tile(context: Context):
    """Successive key blocks alternate between the score slots, and S of a block is issued before O of the last one."""
    plan, barriers = context.plan, context.barriers
    q, k, v = _operands(context)
    q_phase, turn = Int32(0), Int32(0)
    ring = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, plan.kv_stages)
    number, done, read = dispatch.first(context), Int32(0), Int32(0)
    while number < context.work.count:
        visits, cursor = context.visits(context.work.at(number), read)
        count = visits.count
        barriers.q.sync_object_full.wait(0, q_phase)
        for step in cutlass.range(count + 1, unroll=1):
            _, cursor = visits.next(cursor)
            if step < count:
                ring = _score(context, (turn + step) % SLOTS, q[None, None, None, 0], k, ring, True)
                if step == count - 1:
                    commit(barriers.q.sync_object_empty, 0, plan.cta_group)
            if step > 0:
                before = turn + step - 1
                ring = _output(context, (before % SLOTS, 0, (before // SLOTS) % 2), v, ring, step > 1, True)
                commit(barriers.o_full, 0, plan.cta_group)
        turn += count
        q_phase ^= 1
        read = cursor.read
        number, done = dispatch.following(context, number, done)
