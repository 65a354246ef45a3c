"""A consumer warpgroup for wide heads: every other block of queries is its own; half the columns of dK and dV.

The registers of a block hold dK and dV of only 64 keys when heads are wide, so the two warpgroups share their columns.
They take turns with the blocks of queries. The owner of a block makes its scores, P, dS and dQ alone, with queries as
rows, so that dS is dQ's left operand without leaving the registers. Both then add its P^T dO and dS^T Q to their
columns of dV and dK, for which P and dS pass through shared memory. While one computes P and dS of its block, the
other's products keep the tensor cores busy. A step of the loop, for a warpgroup's own block j:

    issue S = Q K^T and dP = dO V^T of j, dV += P^T dO and dK += dS^T Q of the other's block j - 1
    P(j) = exp2(S - LSE), into shared memory        while the others run
    dS(j), into shared memory
    dV, dK and dQ = dS K of j, dQ in slices, each of which is then added to global memory

The rings of Q and dO have two stages: a warpgroup's own blocks are always in the same one. A buffer of P and dS is free
again when the block after next is loaded, since the producer waits for all products that read it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from jax_fa4.kernels.common import backward, copies, dq_order, key_tiles, softmax
from jax_fa4.kernels.common.pipelines import buffer, release
from jax_fa4.kernels.sm90.bwd import epilogue
from jax_fa4.kernels.sm90.bwd.fragments import begin, clear, end
from jax_fa4.kernels.sm90.bwd.layouts import as_left_operand, multiply
from jax_fa4.kernels.sm90.bwd.pipes import Barrier, commit
from jax_fa4.kernels.sm90.bwd.rows import Consumer, scores_fragment, statistics

STAGES = 2


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step needs to know of the tile."""

    consumer: Any
    steps: Any
    tile: Any
    blocks: Int32


@cute.jit
def run(kernel, products, shared, pipes, g, dims, key_schedule):
    """All tiles of this block."""
    group = kernel.plan.tile_heads
    consumer = Consumer(kernel, products, shared, pipes, g, dims)
    number, turn, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = key_tiles.steps(kernel, g, dims, tile)
        count = steps.count(group)
        clear(consumer)
        if count > 0:
            work = Work(consumer, steps, tile, key_schedule.blocks)
            place = key_tiles.first(steps, tile.head * group)
            last, before, done = tile.block, place.block, Int32(0)
            begin(consumer, tiles_done)
            if (steps_done + consumer.warpgroup) % 2 == 0:  # the first block is this warpgroup's own
                last, before = step(work, place, steps_done, last, before, True)
                place = key_tiles.following(steps, place)
                done += 1
            pairs = (count - done) // 2
            for pair in cutlass.range(pairs, unroll=1):
                place = key_tiles.following(steps, place)
                last, before = step(work, place, steps_done + done + 2 * pair + 1, last, before, False)
                place = key_tiles.following(steps, place)
            if done + 2 * pairs < count:
                last_of_other(work, steps_done + count - 1)
            end(consumer, tiles_done)
            tiles_done += 1
            steps_done += count
        epilogue.run(consumer, tile)
        number = key_tiles.receive(pipes, shared, turn)
        turn += 1


@cute.jit
def step(work, place, number, last, before, first: cutlass.Constexpr[bool]):
    """A block of this warpgroup's own, and the other's before it unless this is the tile's `first`.

    `last` and `before` are for `take_turn`.
    """
    consumer = work.consumer
    kernel, products, o, pipes = consumer.kernel, consumer.products, consumer.operands, consumer.pipes
    state, other = buffer(number, STAGES), buffer(number - 1, STAGES)
    behind = 0 if first else 2  # groups of products issued after those of this block
    scores = cute.make_rmem_tensor(products.scores.partition_shape_C((64, consumer.plan.block_k)), Float32)
    dp = cute.make_rmem_tensor(scores.shape, Float32)
    fragment = scores_fragment(consumer, scores, place, work.tile)
    pipes.q.consumer_wait(state)
    multiply(products.scores, scores, o.scores_q[None, None, None, state.index], o.scores_k, False)
    pipes.do.consumer_wait(state)
    multiply(products.scores, dp, o.dp_do[None, None, None, state.index], o.dp_v, False)
    if cutlass.const_expr(not first):
        issue_dv(consumer, other)
        issue_dk(consumer, other)
    lse = statistics(consumer, consumer.shared.lse, state.index)
    delta = statistics(consumer, consumer.shared.delta, state.index)
    warpgroup.wait_group(behind + 1)
    slopes = backward.slopes_like(kernel.spec, scores)
    backward.apply_score_mods(kernel.spec, fragment, work.steps.geometry, consumer.g, slopes)
    if place.masked:
        backward.apply_mask(kernel.spec, fragment, work.steps.geometry, consumer.g)
    backward.probabilities(fragment, lse, kernel.scale_log2)
    store_tile(consumer, scores, consumer.p_target, pipes.p, state)
    warpgroup.wait_group(behind)
    backward.score_gradients(fragment, dp, delta, slopes)
    ds = store_tile(consumer, dp, consumer.ds_target, pipes.ds, state)
    if cutlass.const_expr(not first):
        warpgroup.wait_group(0)
        release(pipes.do, other)
        release(pipes.q, other)
    last, before = take_turn(work, place, last, before)
    finish_step(work, place, state, as_left_operand(ds))
    return last, before


def finish_step(work, place, state, ds: cute.Tensor) -> None:
    """dV, dK and dQ of a warpgroup's own block, whose dS is in its registers too.

    The first slices of dQ run beside dV and dK. The assembler serialises all products if one slice's registers are read
    while the next, or dK, runs.
    """
    consumer, slices = work.consumer, work.consumer.plan.dq_slices
    for part in range(max(slices, 2)):
        if part == 0:
            issue_dv(consumer, state)
        if part == 1:
            issue_dk(consumer, state)
        dq = issue_dq(consumer, ds, part) if part < slices else None
        warpgroup.wait_group(0)
        if dq is not None:
            add_dq(work, place, dq, part)
        if part < 2:
            release((consumer.pipes.do, consumer.pipes.q)[part], state)
    pass_turn(work, place)


@cute.jit
def last_of_other(work, number):
    """The products of a tile's last block, if it is the other warpgroup's."""
    consumer = work.consumer
    state = buffer(number, STAGES)
    issue_dv(consumer, state)
    issue_dk(consumer, state)
    warpgroup.wait_group(1)
    release(consumer.pipes.do, state)
    warpgroup.wait_group(0)
    release(consumer.pipes.q, state)


def issue_dv(consumer, state) -> None:
    """dV += P^T dO of a block, when its P is there."""
    o, index = consumer.operands, state.index
    consumer.pipes.p.consumer_wait(state)
    multiply(consumer.products.dv, o.dv, o.dv_p[None, None, None, index], o.dv_do[None, None, None, index], True)


def issue_dk(consumer, state) -> None:
    """dK += dS^T Q of a block, when its dS is there."""
    o, index = consumer.operands, state.index
    consumer.pipes.ds.consumer_wait(state)
    multiply(consumer.products.dk, o.dk, o.dk_ds[None, None, None, index], o.dk_q[None, None, None, index], True)


def issue_dq(consumer, ds: cute.Tensor, part: int) -> cute.Tensor:
    """One slice of dQ = dS K, by dS in registers."""
    plan, product = consumer.plan, consumer.products.dq
    dq = cute.make_rmem_tensor(product.partition_shape_C((plan.block_q, plan.tile_d // plan.dq_slices)), Float32)
    columns = consumer.operands.dq_k[None, part, None]  # (values, k); a product takes (values, column tiles, k)
    layout = cute.append(columns.layout, cute.make_layout(1))
    k = cute.make_tensor(columns.iterator, cute.select(layout, mode=[0, 2, 1]))
    multiply(product, dq, ds, k, False)
    return dq


def add_dq(work, place, dq: cute.Tensor, part: int) -> None:
    """Adds a slice of dQ to the accumulator, four registers of each thread at a time."""
    consumer, size = work.consumer, cute.size(dq)
    tile = copies.address(consumer.g.dq_accumulator, work.tile.batch, place.head, place.block, 0)
    address = tile.toint() + (part * size * 128 + 4 * consumer.thread) * 4
    for i in range(0, size, 4):
        copies.add_float32(address + i * 128 * 4, [dq[i + j] for j in range(4)])
    cute.arch.sync_warp()  # or the assembler puts off the additions, and their registers do not suffice for all slices


def store_tile(consumer, values: cute.Tensor, target: cute.Tensor, ring, state) -> cute.Tensor:
    """Rounds a fragment of the scores, also into this block's (query, key) tile, of which both warpgroups hear."""
    rounded = cute.make_rmem_tensor(values.shape, consumer.kernel.dtype)
    softmax.convert_pairs(values, rounded)
    cute.copy(consumer.tile_copy, consumer.tile_copy.retile(rounded), target[None, None, None, state.index])
    cute.arch.fence_view_async_shared()
    commit(ring, state)
    return rounded


@cute.jit
def take_turn(work, place, last, before):
    """In a deterministic kernel, waits until the tiles that add to this block's dQ before this one have done so.

    `last` is the last visitor of the block `before`, or of the first block of a head this tile itself.
    """
    consumer = work.consumer
    if cutlass.const_expr(consumer.spec.deterministic):
        kernel, tile = consumer.kernel, work.tile
        last = cutlass.select_(place.block <= before, tile.block, last)
        last = dq_order.last_visitor(kernel, work.steps.geometry, work.blocks, place.block, last)
        before = place.block
        others = dq_order.turn(kernel, consumer.g, tile, place.block, last)
        dq_order.wait(copies.address(consumer.g.dq_counter, tile.batch, place.head, place.block), others)
    return last, before


@cute.jit
def pass_turn(work, place):
    """In a deterministic kernel, lets the next tile add to this block's dQ."""
    consumer = work.consumer
    if cutlass.const_expr(consumer.spec.deterministic):
        cute.arch.barrier(barrier_id=Barrier.DQ_ADDED + consumer.warpgroup, number_of_threads=128)
        if consumer.thread < 32:
            dq_order.release(copies.address(consumer.g.dq_counter, work.tile.batch, place.head, place.block))
