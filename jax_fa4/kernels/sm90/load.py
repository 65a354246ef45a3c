"""The producer warp: brings Q, K and V of each tile into shared memory by TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from jax_fa4.kernels.common import copies, mask, scheduler, sequence

TILE_SLOTS = 2


@cute.jit
def run(kernel, loads, shared, g, dims, schedule):
    """All tiles of this CTA. K runs one block ahead of V, as the consumers need them."""
    plan = kernel.plan
    q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, plan.q_stages)
    k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, plan.stages)
    v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, plan.stages)
    queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, TILE_SLOTS)
    number = cute.arch.block_idx()[0]
    while number < schedule.count:
        tile = schedule.tile(number)
        queue_state = scheduler.announce(shared.tiles, queue_state, tile)
        number = scheduler.next_number(schedule, number, g.next_tile if plan.longest_first else None)
        kv_head = tile.head * plan.packed_heads // kernel.spec.group
        geometry = sequence.geometry(kernel.spec, g, dims, tile.batch)
        order = mask.block_order(kernel.spec.mask, tile.q_block, plan.block_positions, plan.block_k, geometry)

        q_index = tile.q_block if plan.packed_heads == 1 else (0, tile.q_block)
        gq = cute.local_tile(loads.q[None, None, tile.head, tile.batch], plan.q_tile, (q_index, 0))
        gk = cute.local_tile(loads.k[None, None, kv_head, tile.batch], (plan.block_k, plan.tile_dim), (None, 0))
        gv = cute.local_tile(loads.v[None, None, kv_head, tile.batch], (plan.value_tile_dim, plan.block_k), (0, None))
        q_shared, q_global = copies.tma_partition(loads.q_atom, shared.q, gq)
        k_shared, k_global = copies.tma_partition(loads.k_atom, shared.k, gk)
        v_shared, v_global = copies.tma_partition(loads.v_atom, shared.v, gv)

        k_state = _load(loads.k_atom, k_global[None, order.block(Int32(0))], k_shared, shared.k_pipeline, k_state)
        q_state = _load(loads.q_atom, q_global, q_shared, shared.q_pipeline, q_state)
        for step in cutlass.range(1, order.count, unroll=1):
            k_state = _load(loads.k_atom, k_global[None, order.block(step)], k_shared, shared.k_pipeline, k_state)
            v_state = _load(loads.v_atom, v_global[None, order.block(step - 1)], v_shared, shared.v_pipeline, v_state)
        last = order.block(order.count - 1)
        v_state = _load(loads.v_atom, v_global[None, last], v_shared, shared.v_pipeline, v_state)
    queue_state = scheduler.announce(shared.tiles, queue_state, scheduler.Tile(Int32(-1), Int32(0), Int32(0)))


def _load(atom, source, target, ring, state):
    """One TMA load into the ring's next buffer."""
    ring.producer_acquire(state)
    cute.copy(atom, source, target[None, state.index], tma_bar_ptr=ring.producer_get_barrier(state))
    state.advance()
    return state
