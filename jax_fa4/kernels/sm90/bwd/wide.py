"""A consumer warpgroup for wide heads: all 64 keys, half the queries of the scores, half the columns of dK, dV and dQ.

The registers of a block hold dK and dV of only 64 keys when heads are wide, so the warpgroups share the keys, and P and
dS pass through shared memory. One step of the loop, for query block j, with dS(j) there:

    issue dK += dS^T Q, dQ(j) = dS K, and S^T(j + 1)
    dQ(j) to shared memory, for the store warp      while S runs
    issue dP^T(j + 1)
    P(j + 1) = exp2(S - LSE), into shared memory    while dP runs; meet the other warpgroup
    issue dV += P^T dO of j + 1
    dS(j + 1), into shared memory                   while dV runs; meet the other warpgroup

dQ is made and handed over in `dq_slices` parts, as registers and shared memory do not hold all of it.
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
from jax_fa4.kernels.sm90.bwd.layouts import multiply
from jax_fa4.kernels.sm90.bwd.pipes import Barrier


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
    plan, group = kernel.plan, kernel.plan.tile_heads
    consumer = Consumer(kernel, products, shared, pipes, g, dims)
    number, turn, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = key_tiles.steps(kernel, g, dims, tile)
        count = steps.count(group)
        clear(consumer)
        if count > 0:
            p = cute.make_rmem_tensor(products.scores.partition_shape_C((plan.block_k, plan.block_q)), Float32)
            dp = cute.make_rmem_tensor(p.shape, Float32)
            work = Work(consumer, steps, tile, p, dp, backward.slopes_like(kernel.spec, p))
            place = key_tiles.first(steps, tile.head * group)
            begin(consumer, tiles_done)
            issue_scores(work, steps_done)
            issue_dp(work, steps_done)
            warpgroup.wait_group(1)
            make_p(work, place, steps_done)
            cute.arch.fence_view_async_shared()
            meet(consumer)
            finish_scores(work, steps_done)
            for i in cutlass.range(1, count, unroll=1):
                place = key_tiles.following(steps, place)
                step(work, place, steps_done + i - 1)
            last_step(work, steps_done + count - 1)
            end(consumer, tiles_done)
            tiles_done += 1
            steps_done += count
        epilogue.run(consumer, tile)
        number = key_tiles.receive(pipes, shared, turn)
        turn += 1


@cute.jit
def step(work, following, number):
    """dK and dQ of the step with this number; then P, dV and dS of the `following` one."""
    consumer = work.consumer
    plan = consumer.plan
    dq = begin_step(work, number)
    issue_scores(work, number + 1)
    warpgroup.wait_group(2)
    release(consumer.pipes.q, buffer(number, plan.q_stages))
    warpgroup.wait_group(1)
    epilogue.stage_dq(consumer, dq)
    if cutlass.const_expr(plan.dq_slices == 2):
        second = issue_dq(consumer, number, 1)
    issue_dp(work, number + 1)
    hand_over(consumer)
    warpgroup.wait_group(plan.dq_slices)
    make_p(work, following, number + 1)
    if cutlass.const_expr(plan.dq_slices == 2):
        warpgroup.wait_group(1)
        epilogue.stage_dq(consumer, second)
    cute.arch.fence_view_async_shared()  # of P, and of dQ
    if cutlass.const_expr(plan.dq_slices == 2):
        epilogue.hand_over_dq(consumer)
    meet(consumer)
    finish_scores(work, number + 1)


@cute.jit
def last_step(work, number):
    """dK and dQ of a tile's last step."""
    consumer = work.consumer
    plan = consumer.plan
    dq = begin_step(work, number)
    warpgroup.wait_group(1)
    release(consumer.pipes.q, buffer(number, plan.q_stages))
    warpgroup.wait_group(0)
    epilogue.stage_dq(consumer, dq)
    hand_over(consumer)
    if cutlass.const_expr(plan.dq_slices == 2):
        second = issue_dq(consumer, number, 1)
        warpgroup.wait_group(0)
        epilogue.stage_dq(consumer, second)
        hand_over(consumer)


def begin_step(work, number: Int32) -> cute.Tensor:
    """Releases dO of a step, and issues its dK and the first slice of its dQ."""
    consumer = work.consumer
    plan, products, o, pipes = consumer.plan, consumer.products, consumer.operands, consumer.pipes
    release(pipes.do, buffer(number, plan.do_stages))
    q, ds = buffer(number, plan.q_stages), buffer(number, plan.ds_stages)
    multiply(products.dk, o.dk, o.dk_ds[None, None, None, ds.index], o.dk_q[None, None, None, q.index], True)
    return issue_dq(consumer, number, 0)


@cute.jit
def finish_scores(work, number):
    """With P in shared memory and dP on its way: dV, and dS into shared memory too."""
    consumer = work.consumer
    plan, products, o = consumer.plan, consumer.products, consumer.operands
    do, ds = buffer(number, plan.do_stages), buffer(number, plan.ds_stages)
    multiply(products.dv, o.dv, o.dv_p[None, None, None, ds.index], o.dv_do[None, None, None, do.index], True)
    warpgroup.wait_group(1)
    # Delta is per query, and P of masked scores is 0 already: the place does not matter here.
    fragment = scores_fragment(consumer, work.p, key_tiles.nowhere(), work.tile)
    delta = Statistics(consumer, consumer.shared.delta, do.index)
    backward.score_gradients(fragment, work.dp, delta, work.slopes)
    store_tile(consumer, work.dp, consumer.ds_target, number)
    cute.arch.fence_view_async_shared()
    warpgroup.wait_group(0)
    meet(consumer)


def store_tile(consumer, values: cute.Tensor, target: cute.Tensor, number: Int32) -> None:
    """Rounds a fragment of the scores into this step's (key, query) tile."""
    rounded = cute.make_rmem_tensor(values.shape, consumer.kernel.dtype)
    softmax.convert_pairs(values, rounded)
    stage = buffer(number, consumer.plan.ds_stages).index
    cute.copy(consumer.tile_copy, consumer.tile_copy.retile(rounded), target[None, None, None, stage])


def meet(consumer) -> None:
    """Waits for the other warpgroup; what both have stored and fenced is then visible to their products."""
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=128 * consumer.plan.consumers)


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


def issue_dq(consumer, number: Int32, part: int) -> cute.Tensor:
    """One slice of dQ = dS K of a step."""
    plan, product, o = consumer.plan, consumer.products.dq, consumer.operands
    shape = (plan.block_q, plan.tile_d // plan.dq_slices)
    dq = cute.make_rmem_tensor(product.partition_shape_C(shape), Float32)
    columns = o.dq_k[None, part, None]  # (values, k); a product takes (values, column tiles, k)
    layout = cute.append(columns.layout, cute.make_layout(1))
    k = cute.make_tensor(columns.iterator, cute.select(layout, mode=[0, 2, 1]))
    stage = buffer(number, plan.ds_stages).index
    multiply(product, dq, o.dq_ds[None, None, None, stage], k, False)
    return dq


@cute.jit
def make_p(work, place, number):
    """P of a step from its S, in place and into shared memory."""
    consumer = work.consumer
    kernel, g, geometry = consumer.kernel, consumer.g, work.steps.geometry
    fragment = scores_fragment(consumer, work.p, place, work.tile)
    state = buffer(number, consumer.plan.q_stages)
    backward.apply_score_mods(kernel.spec, fragment, geometry, g, work.slopes)
    if place.masked:
        backward.apply_mask(kernel.spec, fragment, geometry, g)
    backward.probabilities(fragment, Statistics(consumer, consumer.shared.lse, state.index), kernel.scale_log2)
    store_tile(consumer, work.p, consumer.p_target, number)
