"""A consumer warpgroup: 64 rows of the transposed scores, and its rows of dK and dV in registers.

One step (a block j of queries) of the loop:

    issue S^T = K Q^T and dP^T = V dO^T
    P^T = exp2(S^T - LSE)                              while dP runs
    dS^T = P^T * (dP^T - delta), also into shared memory
    issue dV += P^T dO and dK += dS^T Q
    issue dQ(j - 1) = dS K                             needs dS of all warpgroups
    dQ(j - 1) to shared memory, for the store warp

dQ lags one step behind so that warpgroups need not keep step with each other: while one computes P and dS, the others'
products keep the tensor cores busy. `take_turn` in the first step of a tile sets them apart (8 % faster than without).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from jax_fa4.kernels.common import backward, key_tiles, softmax
from jax_fa4.kernels.common.pipelines import buffer, release
from jax_fa4.kernels.sm90.bwd import epilogue
from jax_fa4.kernels.sm90.bwd.fragments import Consumer, Statistics, begin, clear, end, scores_fragment
from jax_fa4.kernels.sm90.bwd.layouts import as_left_operand, multiply
from jax_fa4.kernels.sm90.bwd.pipes import Barrier, commit


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
            work = Work(consumer, steps, tile)
            place = key_tiles.first(steps, tile.head * group)
            begin(consumer, tiles_done)
            step(work, place, steps_done, True)
            for i in cutlass.range(1, count, unroll=1):
                place = key_tiles.following(steps, place)
                step(work, place, steps_done + i, False)
            last_dq(consumer, steps_done + count - 1)
            end(consumer, tiles_done)
            tiles_done += 1
            steps_done += count
        epilogue.run(consumer, tile)
        number = key_tiles.receive(pipes, shared, turn)
        turn += 1


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step needs to know of the tile."""

    consumer: Any
    steps: Any
    tile: Any


@cute.jit
def step(work, place, number, first: cutlass.Constexpr[bool]):
    """One block of queries, and dQ of the one before unless this is the tile's `first`."""
    consumer = work.consumer
    plan, kernel, products, o, pipes = (
        consumer.plan, consumer.kernel, consumer.products, consumer.operands, consumer.pipes
    )
    q, do, ds_buffer = buffer(number, plan.q_stages), buffer(number, plan.do_stages), buffer(number, plan.ds_stages)
    before = buffer(number - 1, plan.ds_stages)
    # Fresh registers every step: a product takes its accumulator's old values as input, also where it ignores them.
    scores = cute.make_rmem_tensor(products.scores.partition_shape_C((plan.block_k, plan.block_q)), Float32)
    dp = cute.make_rmem_tensor(scores.shape, Float32)
    fragment = scores_fragment(consumer, scores, place, work.tile)
    if cutlass.const_expr(first):
        take_turn(consumer)
    pipes.q.consumer_wait(q)
    multiply(products.scores, scores, o.scores_k, o.scores_q[None, None, None, q.index], False)
    pipes.do.consumer_wait(do)
    multiply(products.scores, dp, o.dp_v, o.dp_do[None, None, None, do.index], False)
    lse = Statistics(consumer, consumer.shared.lse, q.index)
    warpgroup.wait_group(1)
    slopes = backward.slopes_like(kernel.spec, scores)
    backward.apply_score_mods(kernel.spec, fragment, work.steps.geometry, consumer.g, slopes)
    if place.masked:
        backward.apply_mask(kernel.spec, fragment, work.steps.geometry, consumer.g)
    backward.probabilities(fragment, lse, kernel.scale_log2)
    delta = Statistics(consumer, consumer.shared.delta, do.index)
    warpgroup.wait_group(0)
    backward.score_gradients(fragment, dp, delta, slopes)
    p = cute.make_rmem_tensor(scores.shape, kernel.dtype)
    softmax.convert_pairs(scores, p)
    ds = cute.make_rmem_tensor(scores.shape, kernel.dtype)
    softmax.convert_pairs(dp, ds)

    multiply(products.dv, o.dv, as_left_operand(p), o.dv_do[None, None, None, do.index], True)
    if cutlass.const_expr(first):
        pass_turn(consumer)
    if cutlass.const_expr(not first and plan.ds_stages == 2):
        pipes.ds.consumer_wait(before)  # the others have read this buffer's last contents
    cute.copy(consumer.tile_copy, consumer.tile_copy.retile(ds), consumer.ds_target[None, None, None, ds_buffer.index])
    if cutlass.const_expr(plan.block_q > 64):
        warpgroup.wait_group(0)  # registers do not suffice to have both products in flight
    multiply(products.dk, o.dk, as_left_operand(ds), o.dk_q[None, None, None, q.index], True)
    if cutlass.const_expr(not first):
        if cutlass.const_expr(plan.ds_stages > 2):
            pipes.ds.consumer_wait(before)
        dq = issue_dq(consumer, before)
    warpgroup.wait_group(1 if first else 2)
    release(pipes.do, do)
    warpgroup.wait_group(0 if first else 1)
    release(pipes.q, q)
    if cutlass.const_expr(not first):
        warpgroup.wait_group(0)
        epilogue.stage_dq(consumer, dq)
    cute.arch.fence_view_async_shared()  # of dQ and of dS
    if cutlass.const_expr(not first):
        epilogue.hand_over_dq(consumer)
    commit(pipes.ds, ds_buffer)  # also: this warp's dQ of the step before is done


def issue_dq(consumer, state) -> cute.Tensor:
    """dQ = dS K of a step, or its transpose, by its buffer of dS."""
    plan, product, o = consumer.plan, consumer.products.dq, consumer.operands
    shape, operands = (plan.block_q, plan.dq_columns), (o.dq_ds[None, None, None, state.index], o.dq_k)
    if plan.dq_transposed:
        shape, operands = shape[::-1], operands[::-1]
    dq = cute.make_rmem_tensor(product.partition_shape_C(shape), Float32)
    multiply(product, dq, *operands, False)
    return dq


def last_dq(consumer, number) -> None:
    """dQ of a tile's last step."""
    state = buffer(number, consumer.plan.ds_stages)
    consumer.pipes.ds.consumer_wait(state)
    dq = issue_dq(consumer, state)
    warpgroup.wait_group(0)
    epilogue.stage_dq(consumer, dq)
    cute.arch.fence_view_async_shared()
    epilogue.hand_over_dq(consumer)


@cute.jit
def take_turn(consumer):
    """At a tile's first step: waits until the warpgroup before has queued its last products of that step."""
    if consumer.warpgroup > 0:
        cute.arch.barrier(barrier_id=Barrier.TURN + consumer.warpgroup - 1, number_of_threads=256)


@cute.jit
def pass_turn(consumer):
    """Lets the next warpgroup begin the tile."""
    if consumer.warpgroup < consumer.plan.consumers - 1:
        cute.arch.barrier_arrive(barrier_id=Barrier.TURN + consumer.warpgroup, number_of_threads=256)
