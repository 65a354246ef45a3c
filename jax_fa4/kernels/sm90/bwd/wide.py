"""A consumer warpgroup for wide heads: all 64 keys, half the queries of the scores, half the columns of dK, dV and dQ.

The registers of a block hold dK and dV of only 64 keys when heads are wide, so the warpgroups share the keys, and P and
dS pass through shared memory. One step of the loop, for query block j, with P(j) and dP(j) in registers:

    dS(j), and with P(j) into shared memory; meet the other warpgroup
    issue dV += P^T dO, dK += dS^T Q, dQ(j) = dS K
    issue S^T(j + 1)
    dQ(j) to shared memory, for the store warp      while S runs
    issue dP^T(j + 1)
    P(j + 1) = exp2(S - LSE)                        while dP runs

dQ is made and handed over in `dq_slices` parts, as registers and shared memory do not hold all of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from jax_fa4.kernels.common import backward, softmax
from jax_fa4.kernels.sm90.bwd import epilogue, schedule
from jax_fa4.kernels.sm90.bwd.fragments import Consumer, Statistics, begin, clear, end, scores_fragment
from jax_fa4.kernels.sm90.bwd.layouts import multiply
from jax_fa4.kernels.sm90.bwd.pipes import Barrier, buffer, release


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step needs to know of the tile, and its registers: P, dP, and dy/dx of the score mods (or None)."""

    consumer: Any
    steps: Any
    tile: Any
    p: cute.Tensor
    dp: cute.Tensor
    slopes: cute.Tensor | None


@cute.jit
def run(kernel, products, shared, pipes, g, dims, key_schedule):
    """All tiles of this block."""
    plan, group = kernel.plan, kernel.spec.group
    consumer = Consumer(kernel, products, shared, pipes, g, dims)
    number, turn, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = schedule.steps(kernel, g, dims, tile)
        count = steps.count(group)
        clear(consumer)
        if count > 0:
            p = cute.make_rmem_tensor(products.scores.partition_shape_C((plan.block_k, plan.block_q)), Float32)
            dp = cute.make_rmem_tensor(p.shape, Float32)
            work = Work(consumer, steps, tile, p, dp, backward.slopes_like(kernel.spec, p))
            block, head = steps.start, tile.head * group
            begin(consumer, tiles_done)
            issue_scores(work, steps_done)
            issue_dp(work, steps_done)
            warpgroup.wait_group(1)
            make_p(work, block, head, steps_done)
            warpgroup.wait_group(0)
            for i in cutlass.range(1, count, unroll=1):
                block, head = steps.following(block, head)
                step(work, block, head, steps_done + i - 1, False)
            step(work, block, head, steps_done + count - 1, True)
            end(consumer, tiles_done)
            tiles_done += 1
            steps_done += count
        epilogue.run(consumer, tile)
        number = schedule.receive(pipes, shared, turn)
        turn += 1


@cute.jit
def step(work, next_block, next_head, number, last: cutlass.Constexpr[bool]):
    """Gradients of the step with this number, and P and dP of the next block, unless the step is the tile's `last`."""
    consumer = work.consumer
    plan, products, o, pipes = consumer.plan, consumer.products, consumer.operands, consumer.pipes
    q, do, ds = buffer(number, plan.q_stages), buffer(number, plan.do_stages), buffer(number, plan.ds_stages)
    publish(work, number)
    multiply(products.dv, o.dv, o.dv_p[None, None, None, ds.index], o.dv_do[None, None, None, do.index], True)
    multiply(products.dk, o.dk, o.dk_ds[None, None, None, ds.index], o.dk_q[None, None, None, q.index], True)
    dq = issue_dq(consumer, ds.index, 0)
    warpgroup.wait_group(2)
    release(pipes.do, do)
    if cutlass.const_expr(not last):
        issue_scores(work, number + 1)
    warpgroup.wait_group(1 if last else 2)
    release(pipes.q, q)
    warpgroup.wait_group(0 if last else 1)
    epilogue.stage_dq(consumer, dq)
    if cutlass.const_expr(plan.dq_slices == 1):
        if cutlass.const_expr(not last):
            issue_dp(work, number + 1)
        hand_over(consumer)
        if cutlass.const_expr(not last):
            warpgroup.wait_group(1)
            make_p(work, next_block, next_head, number + 1)
            warpgroup.wait_group(0)
    else:
        second = issue_dq(consumer, ds.index, 1)
        if cutlass.const_expr(not last):
            issue_dp(work, number + 1)
        hand_over(consumer)
        if cutlass.const_expr(not last):
            warpgroup.wait_group(2)
            make_p(work, next_block, next_head, number + 1)
        warpgroup.wait_group(0 if last else 1)
        epilogue.stage_dq(consumer, second)
        hand_over(consumer)
        warpgroup.wait_group(0)


def hand_over(consumer) -> None:
    """Lets the store warp have what `stage_dq` wrote."""
    cute.arch.fence_view_async_shared()
    epilogue.hand_over_dq(consumer)


def issue_scores(work, number: Int32) -> None:
    """S^T = K Q^T of a step, when its Q has arrived."""
    consumer = work.consumer
    state, o = buffer(number, consumer.plan.q_stages), consumer.operands
    consumer.pipes.q.consumer_wait(state)
    multiply(consumer.products.scores, work.p, o.scores_k, o.scores_q[None, None, None, state.index], False)


def issue_dp(work, number: Int32) -> None:
    """dP^T = V dO^T of a step, when its dO has arrived."""
    consumer = work.consumer
    state, o = buffer(number, consumer.plan.do_stages), consumer.operands
    consumer.pipes.do.consumer_wait(state)
    multiply(consumer.products.scores, work.dp, o.dp_v, o.dp_do[None, None, None, state.index], False)


def issue_dq(consumer, stage: Int32, part: int) -> cute.Tensor:
    """One slice of dQ = dS K of the step whose dS is in buffer `stage`."""
    plan, product, o = consumer.plan, consumer.products.dq, consumer.operands
    shape = (plan.block_q, plan.tile_d // plan.dq_slices)
    dq = cute.make_rmem_tensor(product.partition_shape_C(shape), Float32)
    columns = o.dq_k[None, part, None]  # (values, k); a product takes (values, column tiles, k)
    layout = cute.append(columns.layout, cute.make_layout(1))
    k = cute.make_tensor(columns.iterator, cute.select(layout, mode=[0, 2, 1]))
    multiply(product, dq, o.dq_ds[None, None, None, stage], k, False)
    return dq


@cute.jit
def make_p(work, block, head, number):
    """P of a step from its S, in place."""
    consumer = work.consumer
    kernel, g, geometry = consumer.kernel, consumer.g, work.steps.geometry
    fragment = scores_fragment(consumer, work.p, block, head, work.tile)
    state = buffer(number, consumer.plan.q_stages)
    backward.apply_score_mods(kernel.spec, fragment, geometry, g, work.slopes)
    if work.steps.masked(block):
        backward.apply_mask(kernel.spec, fragment, geometry, g)
    backward.probabilities(fragment, Statistics(consumer, consumer.shared.lse, state.index), kernel.scale_log2)


@cute.jit
def publish(work, number):
    """dS of a step from its P and dP; both into shared memory, for both warpgroups."""
    consumer = work.consumer
    plan, kernel, shared = consumer.plan, consumer.kernel, consumer.shared
    do, ds = buffer(number, plan.do_stages), buffer(number, plan.ds_stages)
    # Delta is per query and P's masked elements are 0 already: neither block nor head matter here.
    fragment = scores_fragment(consumer, work.p, Int32(0), Int32(0), work.tile)
    delta = Statistics(consumer, shared.delta, do.index)
    backward.score_gradients(fragment, work.dp, delta, work.slopes)
    for values, target in ((work.p, consumer.p_target), (work.dp, consumer.ds_target)):
        rounded = cute.make_rmem_tensor(values.shape, kernel.dtype)
        softmax.convert_pairs(values, rounded)
        cute.copy(consumer.tile_copy, consumer.tile_copy.retile(rounded), target[None, None, None, ds.index])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=128 * plan.consumers)
