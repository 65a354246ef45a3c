"""Consumer warpgroups for wide heads: one makes P and dV, the other dS and dK, and they share the columns of dQ.

The registers of a block hold dK and dV of only 64 keys when heads are wide. Split by product, an operand is read from
shared memory, which bounds this kernel, by one warpgroup alone, and P and dS are left operands from registers. Only dS
is in shared memory as well, for dQ; and the first warpgroup mails P to the second, thread by thread, as both hold the
same scores. One step, for query block j, whose P is made and mailed and whose dP is on its way:

    P warpgroup                                    dS warpgroup
    issue dV += P^T dO                             dS(j) = P(j) * (dP(j) - delta), into shared memory too
    meet                                           meet
    issue dQ(j) = dS K, its columns; S^T(j + 1)    issue dQ(j) = dS K, its columns; dK += dS^T Q
    P(j + 1) = exp2(S - LSE), mailed               issue dP^T(j + 1)

dQ is made and handed over in parts, as registers and shared memory do not hold all of it: the second slice is issued
when the first has left. The P warpgroup hands its last slice over in the next step, beside dV.

The order also minds the assembler, which makes all products wait for each other where it cannot follow them: a product
that is under way when a loop turns must be awaited with all others before its registers are read.
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
from jax_fa4.kernels.sm90.bwd.fragments import Consumer, Statistics, begin, end, scores_fragment
from jax_fa4.kernels.sm90.bwd.layouts import as_left_operand, multiply
from jax_fa4.kernels.sm90.bwd.pipes import Barrier

P_WARPGROUP, DS_WARPGROUP = 0, 1

MAIL_SCALE = 2.0**15
"""P is mailed in float16 times this: float16 is finer than bfloat16, and small P are not subnormal."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step needs to know of the tile, and registers that live from step to step: S or dP, and a slice of dQ."""

    consumer: Any
    steps: Any
    tile: Any
    scores: cute.Tensor
    p: cute.Tensor
    dq: cute.Tensor


@cute.jit
def run(kernel, products, shared, pipes, g, dims, key_schedule):
    """All tiles of this block."""
    consumer = Consumer(kernel, products, shared, pipes, g, dims)
    if consumer.warpgroup == P_WARPGROUP:
        run_tiles(consumer, key_schedule, P_WARPGROUP)
    else:
        run_tiles(consumer, key_schedule, DS_WARPGROUP)


@cute.jit
def run_tiles(consumer, key_schedule, role: cutlass.Constexpr[int]):
    """All tiles, in one of the roles."""
    kernel, products, pipes, group = consumer.kernel, consumer.products, consumer.pipes, consumer.plan.tile_heads
    plan, g, o = consumer.plan, consumer.g, consumer.operands
    step = p_step if role == P_WARPGROUP else ds_step
    number, turn, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = key_tiles.steps(kernel, g, consumer.dims, tile)
        count = steps.count(group)
        gradient = o.dv if role == P_WARPGROUP else o.dk
        gradient.fill(0.0)
        if count > 0:
            scores = cute.make_rmem_tensor(products.scores.partition_shape_C((plan.block_k, plan.block_q)), Float32)
            dq_shape = products.dq.partition_shape_C((plan.block_q, plan.tile_d // plan.dq_slices))
            p = cute.make_rmem_tensor(scores.shape, kernel.dtype)
            work = Work(consumer, steps, tile, scores, p, cute.make_rmem_tensor(dq_shape, Float32))
            place = key_tiles.first(steps, tile.head * group)
            begin(consumer, tiles_done)
            if cutlass.const_expr(role == P_WARPGROUP):
                issue_scores(work, steps_done)
                warpgroup.wait_group(0)
                make_p(work, place, steps_done)
                cute.arch.barrier_arrive(barrier_id=Barrier.P_MAILED, number_of_threads=256)
            else:
                issue_dp(work, steps_done)
            for i in cutlass.range(count - 1, unroll=1):
                place = key_tiles.following(steps, place)
                step(work, place, steps_done + i, i > 0, False)
            step(work, place, steps_done + count - 1, count > 1, True)
            end(consumer, tiles_done)
            tiles_done += 1
            steps_done += count
        if cutlass.const_expr(role == P_WARPGROUP):
            epilogue.write_dv(consumer, tile)
        else:
            epilogue.write_dk(consumer, tile)
        number = key_tiles.receive(pipes, consumer.shared, turn)
        turn += 1


@cute.jit
def make_p(work, place, number):
    """P of a step from its S, rounded, and mailed."""
    consumer, kernel, geometry = work.consumer, work.consumer.kernel, work.steps.geometry
    q = buffer(number, consumer.plan.q_stages)
    fragment = scores_fragment(consumer, work.scores, place, work.tile)
    slopes = backward.slopes_like(kernel.spec, work.scores)
    backward.apply_score_mods(kernel.spec, fragment, geometry, consumer.g, slopes)
    if place.masked:
        backward.apply_mask(kernel.spec, fragment, geometry, consumer.g)
    backward.probabilities(fragment, Statistics(consumer, consumer.shared.lse, q.index), kernel.scale_log2)
    release(consumer.pipes.q, q)
    softmax.convert_pairs(work.scores, work.p)
    mail(consumer, work.scores, slopes)


def issue_dv(work, number) -> None:
    """dV += P^T dO of a step."""
    consumer, o = work.consumer, work.consumer.operands
    do = buffer(number, consumer.plan.do_stages)
    consumer.pipes.do.consumer_wait(do)
    multiply(consumer.products.dv, o.dv, as_left_operand(work.p), o.dv_do[None, None, None, do.index], True)


@cute.jit
def p_step(work, following, number, dq_waits, last: cutlass.Constexpr[bool]):
    """dV and dQ of the step with this number; then P of the `following` one. `dq_waits`: dQ of the one before does."""
    consumer = work.consumer
    plan = consumer.plan
    issue_dv(work, number)
    if dq_waits:
        send_dq(work)
    cute.arch.barrier(barrier_id=Barrier.DS_STORED, number_of_threads=256)
    issue_dq(work, number, 0)
    if cutlass.const_expr(not last):
        issue_scores(work, number + 1)
    warpgroup.wait_group(1 if last else 2)
    release(consumer.pipes.do, buffer(number, plan.do_stages))
    if cutlass.const_expr(plan.dq_slices == 2):
        warpgroup.wait_group(0 if last else 1)
        send_dq(work)
        issue_dq(work, number, 1)
        if cutlass.const_expr(not last):
            warpgroup.wait_group(1)
    else:
        warpgroup.wait_group(0)
    if cutlass.const_expr(not last):
        make_p(work, following, number + 1)
    warpgroup.wait_group(0)  # dQ: dS may now be overwritten
    if cutlass.const_expr(not last):
        cute.arch.barrier_arrive(barrier_id=Barrier.P_MAILED, number_of_threads=256)
    else:
        send_dq(work)


@cute.jit
def ds_step(work, following, number, dq_waits, last: cutlass.Constexpr[bool]):
    """dS, dK and dQ of the step with this number; then dP of the next."""
    consumer = work.consumer
    plan, kernel, products, o, pipes = (
        consumer.plan, consumer.kernel, consumer.products, consumer.operands, consumer.pipes
    )
    q, do, dp = buffer(number, plan.q_stages), buffer(number, plan.do_stages), work.scores
    delta = Statistics(consumer, consumer.shared.delta, do.index)
    p = cute.make_rmem_tensor(dp.shape, Float32)
    cute.arch.barrier(barrier_id=Barrier.P_MAILED, number_of_threads=256)
    receive(consumer, p)
    warpgroup.wait_group(0)
    backward.score_gradients(scores_fragment(consumer, p, following, work.tile), dp, delta, None)
    release(pipes.do, do)
    ds = cute.make_rmem_tensor(dp.shape, kernel.dtype)
    softmax.convert_pairs(dp, ds)
    cute.copy(consumer.tile_copy, consumer.tile_copy.retile(ds), consumer.ds_target[None, None, None, 0])
    cute.arch.fence_view_async_shared()
    pipes.q.consumer_wait(q)
    cute.arch.barrier(barrier_id=Barrier.DS_STORED, number_of_threads=256)
    issue_dq(work, number, 0)
    multiply(products.dk, o.dk, as_left_operand(ds), o.dk_q[None, None, None, q.index], True)
    if cutlass.const_expr(plan.dq_slices == 2):
        warpgroup.wait_group(1)
        send_dq(work)
        issue_dq(work, number, 1)
    if cutlass.const_expr(not last):
        issue_dp(work, number + 1)
    after_dq = (0 if plan.dq_slices == 2 else 1) + (0 if last else 1)
    warpgroup.wait_group(after_dq)
    send_dq(work)
    warpgroup.wait_group(0 if last else 1)
    release(pipes.q, q)


def mail(consumer, p: cute.Tensor, slopes: cute.Tensor | None) -> None:
    """Leaves this thread's P, with score mods times dy/dx, for the same thread of the other warpgroup."""
    mailbox = consumer.shared.mail[None, consumer.thread % 128, None]
    letter = cute.make_rmem_tensor(p.shape, mailbox.element_type)
    for i in range(cute.size(p)):
        if slopes is not None:  # a user's function may have no finite slope where P is 0
            product = p[i] * slopes[i].to(Float32)
            p[i] = cutlass.select_(p[i] == 0.0, Float32(0.0), product)
        else:
            p[i] = p[i] * MAIL_SCALE
    if mailbox.element_type is Float32:
        letter = p
    else:
        softmax.convert_pairs(p, letter)
    cute.autovec_copy(cute.make_tensor(letter.iterator, cute.make_layout(mailbox.shape)), mailbox)


def receive(consumer, p: cute.Tensor) -> None:
    """What `mail` left."""
    mailbox = consumer.shared.mail[None, consumer.thread % 128, None]
    letter = cute.make_rmem_tensor(mailbox.shape, mailbox.element_type)
    cute.autovec_copy(mailbox, letter)
    for i in range(cute.size(p)):
        p[i] = letter[i] if mailbox.element_type is Float32 else letter[i].to(Float32) * (1.0 / MAIL_SCALE)


@cute.jit
def send_dq(work):
    """Hands this warpgroup's slice of dQ to the store warp."""
    plan = work.consumer.plan
    for piece in cutlass.range_constexpr(plan.dq_pieces // plan.dq_slices):
        epilogue.stage_dq(work.consumer, work.dq, piece)
        cute.arch.fence_view_async_shared()
        epilogue.hand_over_dq(work.consumer)


def issue_scores(work, number: Int32) -> None:
    """S^T = K Q^T of a step, when its Q has arrived."""
    consumer = work.consumer
    state, o = buffer(number, consumer.plan.q_stages), consumer.operands
    consumer.pipes.q.consumer_wait(state)
    multiply(consumer.products.scores, work.scores, o.scores_k, o.scores_q[None, None, None, state.index], False)


def issue_dp(work, number: Int32) -> None:
    """dP^T = V dO^T of a step, when its dO has arrived."""
    consumer = work.consumer
    state, o = buffer(number, consumer.plan.do_stages), consumer.operands
    consumer.pipes.do.consumer_wait(state)
    multiply(consumer.products.scores, work.scores, o.dp_v, o.dp_do[None, None, None, state.index], False)


def issue_dq(work, number: Int32, part: int) -> None:
    """One slice of dQ = dS K of a step."""
    consumer = work.consumer
    o = consumer.operands
    columns = o.dq_k[None, part, None]  # (values, k); a product takes (values, column tiles, k)
    layout = cute.append(columns.layout, cute.make_layout(1))
    k = cute.make_tensor(columns.iterator, cute.select(layout, mode=[0, 2, 1]))
    multiply(consumer.products.dq, work.dq, o.dq_ds[None, None, None, 0], k, False)
