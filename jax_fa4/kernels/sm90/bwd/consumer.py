"""A consumer warpgroup: 64 rows of the transposed scores, and its rows of dK and dV in registers.

One step (a block j of queries) of the loop:

    issue S^T = K Q^T and dP^T = V dO^T                some of V from registers (see `BackwardPlan.v_slices`)
    P^T = exp2(S^T - LSE)                              while dP runs
    dS^T = P^T * (dP^T - delta), also into shared memory
    issue dV += P^T dO
    issue dQ(j - 1) = dS K                             needs dS of all warpgroups
    issue dK += dS^T Q
    dQ(j - 1) to shared memory, for the store warp     while dK runs

With more than 64 queries a block V stays in shared memory, and dK comes before dQ (see `BackwardPlan.dq_before_dk`);
where registers do not suffice, dV is awaited first (`dv_alone`). Where none of a tile's first or last queries sees a
key of the warpgroup it makes only dQ(j - 1) in that step (see `idle_step`).

dQ lags one step behind so that warpgroups need not keep step with each other: while one computes P and dS, the others'
products keep the tensor cores busy. `take_turn` in the first step of a tile sets them apart (8 % faster than without).
Where shared memory has room for the K of two tiles, dQ is carried over tiles too: the last one of a tile is made in the
next tile's first step, and neither waits for the other warpgroup in between. Else a tile ends with its `last_dq`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from jax_fa4 import masks
from jax_fa4.kernels.common import backward, key_tiles, softmax
from jax_fa4.kernels.common.pipelines import buffer, release
from jax_fa4.kernels.sm90.bwd import epilogue, keys, load
from jax_fa4.kernels.sm90.bwd.fragments import (
    Consumer,
    Statistics,
    begin,
    clear,
    release_k,
    release_v,
    scores_fragment,
)
from jax_fa4.kernels.sm90.bwd.layouts import as_left_operand, multiply
from jax_fa4.kernels.sm90.bwd.pipes import Barrier, commit


@cute.jit
def run(kernel, products, shared, pipes, g, dims, key_schedule):
    """All tiles of this block."""
    consumer = Consumer(kernel, products, shared, pipes, g, dims)
    number, turn, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
    fresh = Boolean(True)  # no dQ is carried into the next tile
    if cutlass.const_expr(kernel.plan.carries_dq):
        no_ds(consumer)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        heads = keys.heads_of(kernel, tile)
        steps = key_tiles.steps(kernel, g, dims, tile)
        count = steps.count(heads)
        clear(consumer)
        if count > 0:
            work = Work(consumer, steps, tile, tiles_done, fresh)
            place = key_tiles.first(steps, tile.head * heads, heads)
            begin(consumer, tiles_done)
            idle = idle_ends(work, place, count)
            if cutlass.const_expr(idle.first is None):
                step(work, place, steps_done, True, count == 1)
            elif idle.first:
                idle_step(work, steps_done, True, count == 1)
            else:
                step(work, place, steps_done, True, count == 1)
            for i in cutlass.range(1, count if idle.last is None else count - Int32(idle.last), unroll=1):
                if cutlass.const_expr(not kernel.plan.spares_registers):
                    place = key_tiles.following(steps, place)
                step(work, place, steps_done + i, False, i + 1 == count)
            if cutlass.const_expr(idle.last is not None):
                if idle.last:
                    idle_step(work, steps_done + count - 1, False, True)
            if cutlass.const_expr(not kernel.plan.carries_dq):
                release_v(consumer, tiles_done)
                last_dq(consumer, steps_done + count - 1, tiles_done)
            tiles_done += 1
            steps_done += count
            fresh = Boolean(False)
        elif cutlass.const_expr(kernel.plan.carries_dq):  # `store` waits for that dQ, and for many such tiles in a row
            flush(consumer, steps_done, tiles_done, fresh)
            fresh = Boolean(True)
        epilogue.run(consumer, tile)
        number = key_tiles.receive(pipes, shared, turn)
        turn += 1
    if cutlass.const_expr(kernel.plan.carries_dq):
        flush(consumer, steps_done, tiles_done, fresh)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step needs to know of the tile, which is the block's `number`th that has steps.

    `fresh`: the tile before left no dQ to be made. Its first step makes one all the same, which `store` drops.
    """

    consumer: Any
    steps: Any
    tile: Any
    number: Int32
    fresh: Boolean


@cute.jit
def step(work, place, number, first: cutlass.Constexpr[bool], last):
    """One block of queries, and dQ of the one before, which may be the last of the tile before (see `carries_dq`)."""
    consumer = work.consumer
    plan, kernel, products, o, pipes = (
        consumer.plan, consumer.kernel, consumer.products, consumer.operands, consumer.pipes
    )
    q, do, ds_buffer = buffer(number, plan.q_stages), buffer(number, plan.do_stages), ds_of(plan, number)
    carried = first and plan.carries_dq
    makes_dq = carried or not first
    dq_first = makes_dq and plan.dq_before_dk
    before = ds_of(plan, number - 1)
    # Fresh registers every step: a product takes its accumulator's old values as input, also where it ignores them.
    scores = cute.make_rmem_tensor(products.scores.partition_shape_C((plan.block_k, plan.block_q)), Float32)
    dp = cute.make_rmem_tensor(scores.shape, Float32)
    fragment = scores_fragment(consumer, scores)
    if cutlass.const_expr(first):
        take_turn(consumer)
    pipes.q.consumer_wait(q)
    if cutlass.const_expr(plan.spares_registers):
        place = load.told(consumer, q)
    k = in_buffer(o.scores_k, plan, work.number)
    multiply(products.scores, scores, k, o.scores_q[None, None, None, q.index], False)
    if cutlass.const_expr(not plan.dp_after_p):
        issue_dp(consumer, dp, do)
    lse = Statistics(consumer, consumer.shared.lse, q.index)
    warpgroup.wait_group(0 if plan.dp_after_p else 1)
    p = None
    if cutlass.const_expr(kernel.spec.score_mods):
        p = cute.make_rmem_tensor(scores.shape, kernel.dtype)
        located = scores_fragment(consumer, scores, place, work.tile)
        if place.masked:
            make_p(work, located, True, q, p)
        else:
            make_p(work, located, False, q, p)
    else:
        if place.masked:
            in_mask = scores_fragment(consumer, scores, place, work.tile)
            backward.apply_mask(kernel.spec, in_mask, work.steps.geometry, consumer.g)
        backward.probabilities(fragment, lse, kernel.scale_log2)
    if cutlass.const_expr(plan.dp_after_p):
        issue_dp(consumer, dp, do)
    delta = Statistics(consumer, consumer.shared.delta, do.index)
    warpgroup.wait_group(0)
    if cutlass.const_expr(plan.carries_dq):
        if last:  # here, where no product is under way: a branch beside one costs 5 % (D = 64)
            release_v(consumer, work.number)
    backward.score_gradients(fragment, dp, delta)
    if cutlass.const_expr(p is None):
        p = cute.make_rmem_tensor(scores.shape, kernel.dtype)
        softmax.convert_pairs(scores, p)
    ds = cute.make_rmem_tensor(scores.shape, kernel.dtype)
    softmax.convert_pairs(dp, ds)

    multiply(products.dv, o.dv, as_left_operand(p), o.dv_do[None, None, None, do.index], True)
    if cutlass.const_expr(first):
        pass_turn(consumer)
    if cutlass.const_expr(makes_dq and plan.ds_stages == 2):
        pipes.ds.consumer_wait(before)  # the others have read this buffer's last contents
    consumer.store(ds, "ds", ds_buffer.index)
    if cutlass.const_expr(plan.dv_alone):
        warpgroup.wait_group(0)
    if cutlass.const_expr(dq_first):
        dq = dq_of_step_before(work, number, carried)
    multiply(products.dk, o.dk, as_left_operand(ds), o.dk_q[None, None, None, q.index], True)
    if cutlass.const_expr(makes_dq and not dq_first):
        dq = dq_of_step_before(work, number, carried)
    cute.arch.fence_view_async_shared()  # LSE and delta are read: copies, which are asynchronous, may replace them
    warpgroup.wait_group(2 if makes_dq else 1)
    release(pipes.do, do)
    warpgroup.wait_group(1 if makes_dq else 0)
    if cutlass.const_expr(not dq_first):
        release(pipes.q, q)
        warpgroup.wait_group(0)
    if cutlass.const_expr(makes_dq):
        epilogue.stage_dq(consumer, dq)
    cute.arch.fence_view_async_shared()  # of dQ and of dS
    if cutlass.const_expr(makes_dq):
        epilogue.hand_over_dq(consumer)
    commit(pipes.ds, ds_buffer)  # also: this warp's dQ of the step before is done
    if cutlass.const_expr(dq_first):
        warpgroup.wait_group(0)
        release(pipes.q, q)
    if cutlass.const_expr(carried):
        if not work.fresh:
            release_k(consumer, work.number - 1)


def issue_dp(consumer, dp: cute.Tensor, do) -> None:
    """dP^T = V dO^T."""
    consumer.pipes.do.consumer_wait(do)
    products, o = consumer.products, consumer.operands
    held = (products.dp, o.v) if consumer.plan.v_slices else None
    multiply(products.scores, dp, o.dp_v, o.dp_do[None, None, None, do.index], False, held)


def make_p(work, fragment, masked: bool, q, rounded: cute.Tensor) -> None:
    """P, rounded, and P * dy/dx in place of the scores; LSE is read meanwhile."""
    consumer = work.consumer
    lse = Statistics(consumer, consumer.shared.lse, q.index)
    backward.weighted_probabilities(
        consumer.spec, fragment, masked, work.steps.geometry, consumer.g, lse, rounded
    )


@dataclasses.dataclass(frozen=True)
class IdleEnds:
    """Whether a tile's first block of queries, and its last, see no key of this warpgroup; None: each sees some."""

    first: Boolean | None
    last: Boolean | None


def idle_ends(work, place, count) -> IdleEnds:
    """By the queries that see this warpgroup's first and last key."""
    plan, mask, steps = work.consumer.plan, work.consumer.spec.mask, work.steps
    behind, ahead = masks.bounds(mask, steps.geometry)
    first = last = None
    key = work.tile.block * plan.block_k + work.consumer.warpgroup * 64
    if ahead and plan.skips_blocks:
        low, _ = masks.column_interval(mask, key, steps.geometry)
        first = Boolean(low >= (place.block + 1) * plan.block_q)
    if behind and plan.skips_blocks and steps.segments is None:
        _, high = masks.column_interval(mask, cutlass.min(key + 63, steps.geometry.kv_length - 1), steps.geometry)
        last = Boolean(high <= (steps.end - 1) * plan.block_q) & Boolean(count > 1)
    return IdleEnds(first, last)


@cute.jit
def idle_step(work, number, first: cutlass.Constexpr[bool], last):
    """A block of queries that see no key of this warpgroup, whose dS is 0: only dQ of the step before is made."""
    consumer = work.consumer
    plan, pipes = consumer.plan, consumer.pipes
    before, ds_buffer = ds_of(plan, number - 1), ds_of(plan, number)
    carried = first and plan.carries_dq
    makes_dq = carried or not first
    if cutlass.const_expr(first):
        take_turn(consumer)
        pass_turn(consumer)
    if cutlass.const_expr(makes_dq and plan.ds_stages == 2):
        pipes.ds.consumer_wait(before)  # as in `step`
    zero_ds(consumer, ds_buffer)
    if cutlass.const_expr(makes_dq):
        dq = dq_of_step_before(work, number, carried)
        warpgroup.wait_group(0)
        epilogue.stage_dq(consumer, dq)
    cute.arch.fence_view_async_shared()
    if cutlass.const_expr(makes_dq):
        epilogue.hand_over_dq(consumer)
    commit(pipes.ds, ds_buffer)
    for ring in (pipes.q, pipes.do):
        ring.consumer_wait(buffer(number, ring.num_stages))
        release(ring, buffer(number, ring.num_stages))
    if cutlass.const_expr(carried):
        if not work.fresh:
            release_k(consumer, work.number - 1)
    if cutlass.const_expr(plan.carries_dq):
        if last:
            release_v(consumer, work.number)


def carries(work) -> Int32:
    """1 if the first step makes dQ of the tile before, 0 if its dQ is dropped."""
    return Int32(cutlass.select_(work.fresh, Int32(0), Int32(1)))


@cute.jit
def flush(consumer, steps_done, tiles_done, fresh):
    """Makes the dQ that is carried, if one is."""
    if not fresh:
        last_dq(consumer, steps_done - 1, tiles_done - 1)


def no_ds(consumer) -> None:
    """Zeros as dS of the step before the block's first."""
    state = ds_of(consumer.plan, -1)
    zero_ds(consumer, state)
    cute.arch.fence_view_async_shared()
    commit(consumer.pipes.ds, state)


def zero_ds(consumer, state) -> None:
    """Zeros as this warpgroup's part of a buffer of dS."""
    plan = consumer.plan
    zeros = cute.make_rmem_tensor(
        consumer.products.scores.partition_shape_C((plan.block_k, plan.block_q)), consumer.kernel.dtype
    )
    zeros.fill(0.0)
    consumer.store(zeros, "ds", state.index)


def ds_of(plan, number: Int32):
    """The buffer of dS of the block's `number`th step; where dQ is carried, one step's comes before the first."""
    return buffer(number + 1 if plan.carries_dq else number, plan.ds_stages)


def in_buffer(k: Any, plan, tile: Int32):
    """An operand in K's buffer of the block's `tile`th tile."""
    return k if plan.k_stages == 1 else k[None, None, None, buffer(tile, plan.k_stages).index]


def issue_dq(consumer, state, tile: Int32) -> cute.Tensor:
    """dQ = dS K of a step, or its transpose, by its buffer of dS and the number of its tile."""
    plan, product, o = consumer.plan, consumer.products.dq, consumer.operands
    shape = (plan.block_q, plan.dq_columns)
    operands = o.dq_ds[None, None, None, state.index], in_buffer(o.dq_k, plan, tile)
    if plan.dq_transposed:
        shape, operands = shape[::-1], operands[::-1]
    dq = cute.make_rmem_tensor(product.partition_shape_C(shape), Float32)
    multiply(product, dq, *operands, False)
    return dq


def dq_of_step_before(work, number: Int32, carried: bool) -> cute.Tensor:
    """Issues dQ of the step before the block's `number`th, which is the last of the tile before if it is `carried`."""
    consumer = work.consumer
    before = ds_of(consumer.plan, number - 1)
    if consumer.plan.ds_stages > 2:
        consumer.pipes.ds.consumer_wait(before)
    return issue_dq(consumer, before, work.number - carries(work) if carried else work.number)


def last_dq(consumer, number: Int32, tile: Int32) -> None:
    """dQ of a tile's last step, on its own, the last for which its K is needed."""
    state = ds_of(consumer.plan, number)
    consumer.pipes.ds.consumer_wait(state)
    dq = issue_dq(consumer, state, tile)
    warpgroup.wait_group(0)
    release_k(consumer, tile)
    epilogue.stage_dq(consumer, dq)
    cute.arch.fence_view_async_shared()
    epilogue.hand_over_dq(consumer)


@cute.jit
def take_turn(consumer):
    """At a tile's first step: waits until the warpgroup of later keys has queued its first products of that step.

    That one leads as, under a causal mask, it skips the tile's first block.
    """
    if consumer.warpgroup < consumer.plan.consumers - 1:
        cute.arch.barrier(barrier_id=Barrier.TURN + consumer.warpgroup, number_of_threads=256)


@cute.jit
def pass_turn(consumer):
    """Lets the next warpgroup begin the tile."""
    if consumer.warpgroup > 0:
        cute.arch.barrier_arrive(barrier_id=Barrier.TURN + consumer.warpgroup - 1, number_of_threads=256)
