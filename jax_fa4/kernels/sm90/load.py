"""The producer warp: decides which tiles and KV blocks this CTA works on, and brings Q, K and V by TMA."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from jax_fa4.kernels.common import copies, mask, scheduler, segments, sequence

QUEUE_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Copy:
    """Tiles of one tensor: TMA atom, source with a mode of tiles, shared memory with a mode of buffers, their ring."""

    atom: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor
    ring: Any


@cute.jit
def run(kernel, transfers, shared, g, dims, schedule):
    """All tiles of this CTA. K runs one block ahead of V, as the consumers need them.

    The next tile is drawn as late as goes without a pause, so that it goes to the CTA that is free first: before the
    last block is loaded, or after it where tiles have equal length.
    """
    plan, spec = kernel.plan, kernel.spec
    q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, plan.q_stages)
    k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, plan.stages)
    v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, plan.stages)
    queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, QUEUE_SLOTS)
    position = schedule.begin(cute.arch.block_idx()[0])
    # The last V of a tile is loaded after the next tile's first K: so the next tile is worked out in good time.
    waiting = Values(Int32(0), Int32(0), Int32(-1))
    while schedule.is_left(position):
        piece = schedule.piece(position)
        tile = piece.tile
        geometry = sequence.geometry(spec, g, dims, tile.batch)
        blocks, masked_steps, full_steps = _blocks(kernel, g, piece, geometry)
        work = scheduler.Work(tile, masked_steps, full_steps, piece.slot)
        queue_state = scheduler.announce(shared.work, queue_state, work)

        kv_head = tile.head * plan.packed_heads // spec.group
        q, k, v = _copies(kernel, transfers, shared, tile, kv_head)
        block, cursor = _next(blocks, _begin(blocks))
        k_state = _load_keys(k, k_state, block, shared.blocks)
        if waiting.block >= 0:
            v_state = _load(_values(kernel, transfers, shared, waiting), v_state, waiting.block)
        q_state = _load(q, q_state, 0)
        steps = masked_steps + full_steps
        if cutlass.const_expr(plan.longest_first):
            position = _draw_if(steps == 0, schedule, position, g.next_tile)
        for i in cutlass.range(steps, unroll=1):
            if cutlass.const_expr(plan.longest_first):
                position = _draw_if(i == steps - 1, schedule, position, g.next_tile)
            previous = block
            block, cursor = _next(blocks, cursor)
            k_state = _load_keys(k, k_state, block, shared.blocks)
            v_state = _load(v, v_state, previous)
        if cutlass.const_expr(not plan.longest_first):
            position = schedule.following(position, g.next_tile)
        waiting = Values(kv_head, tile.batch, block)
    v_state = _load(_values(kernel, transfers, shared, waiting), v_state, waiting.block)
    queue_state = scheduler.announce(shared.work, queue_state, scheduler.end_of_work())


@cute.jit
def _draw_if(condition, schedule, position, counter):
    if condition:
        position = schedule.following(position, counter)
    return position


@dataclasses.dataclass(frozen=True)
class Values:
    """A block of V that is still to be loaded; none if `block` is negative."""

    kv_head: Int32
    batch: Int32
    block: Int32


@cute.jit
def _blocks(kernel, g, piece, geometry):
    """The piece's KV blocks, and how many are visited after the first one: with the element mask, and without."""
    plan, spec, tile = kernel.plan, kernel.spec, piece.tile
    cut = lambda blocks: blocks if piece.part is None else mask.part_of(blocks, piece.part)  # noqa: E731
    arguments = (spec.mask, tile.q_block, plan.block_positions, plan.block_k, geometry)
    if cutlass.const_expr(segments.in_mask(spec.mask)):
        bounds = (g.q_id_bounds[tile.batch, None, None], g.kv_id_bounds[tile.batch, None, None])
        blocks = cut(segments.segment_blocks(*arguments, bounds))
        masked, full = segments.count(blocks)
        if masked + full == 0:  # no key is left: visit a block of which the element mask then leaves nothing
            blocks, masked = segments.nothing(blocks), Int32(1)
        lead = cutlass.select_(masked > 0, Int32(0), Int32(1))
        return blocks, masked - 1 + lead, full - lead
    order = cut(mask.block_order(*arguments))
    return order, order.masked_steps, order.full_steps


def _begin(blocks):
    return segments.begin(blocks) if isinstance(blocks, segments.SegmentBlocks) else Int32(0)


def _next(blocks, cursor):
    if isinstance(blocks, segments.SegmentBlocks):
        return segments.advance(blocks, cursor)
    return blocks.block(cursor), cursor + 1


def _copies(kernel, transfers, shared, tile, kv_head) -> tuple[Copy, Copy, Copy]:
    """The tile's sources of Q (one tile), K and V (a mode of KV blocks)."""
    plan = kernel.plan
    q_index = tile.q_block if plan.packed_heads == 1 else (0, tile.q_block)
    q = cute.local_tile(transfers.q[None, None, tile.head, tile.batch], plan.q_tile, (q_index, 0))
    k = cute.local_tile(transfers.k[None, None, kv_head, tile.batch], plan.k_tile, (None, 0))
    return (
        _copy(transfers.q_atom, q, shared.q, shared.q_pipeline),
        _copy(transfers.k_atom, k, shared.k, shared.k_pipeline),
        _values(kernel, transfers, shared, Values(kv_head, tile.batch, Int32(0))),
    )


def _values(kernel, transfers, shared, values: Values) -> Copy:
    """The source of V of an example's KV head (a mode of KV blocks)."""
    v = cute.local_tile(transfers.v[None, None, values.kv_head, values.batch], kernel.plan.v_tile, (0, None))
    return _copy(transfers.v_atom, v, shared.v, shared.v_pipeline)


def _copy(atom, source, target, ring) -> Copy:
    target, source = copies.tma_partition(atom, target, source)
    return Copy(atom, source, target, ring)


def _load(copy: Copy, state, index):
    """One TMA load into the ring's next buffer."""
    copy.ring.producer_acquire(state)
    return _issue(copy, state, index)


def _load_keys(copy: Copy, state, block, blocks: cute.Tensor):
    """Loads a block of K, and leaves word of which block the buffer holds for the consumers that see it full."""
    copy.ring.sync_object_empty.wait(state.index, state.phase)
    with cute.arch.elect_one():
        blocks[state.index] = block
    copy.ring.sync_object_full.arrive(state.index, copy.ring.producer_mask)
    return _issue(copy, state, block)


def _issue(copy: Copy, state, index):
    source = copy.source[None, index] if cute.rank(copy.source) > 1 else copy.source
    cute.copy(copy.atom, source, copy.target[None, state.index], tma_bar_ptr=copy.ring.producer_get_barrier(state))
    state.advance()
    return state
