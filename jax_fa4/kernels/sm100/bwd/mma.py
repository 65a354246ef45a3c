"""The mma role: one warp issues all five products of every step; in a pair the leader's, for both CTAs.

    pipelined                            paired                              serial
    S(j + 1) = K Q^T                     S(j + 1)                            S(j)
    dK += dS^T Q(j)                      dK, of dS(j)                        dP(j)
    dQ(j) = dS K                         dP(j + 1)                           dV, of P(j)
    dV += P^T dO(j + 1)                  dQ(j): dS has come from both        dK, of dS(j)
    dP(j + 1) = V dO^T                   dV, of P(j + 1)                     dQ(j)

Pipelined, the exponentials of step j + 1 run beside the products of dS(j), and dQ(j) is read beside dV: in timed runs
of the software GPU 5 % faster than with dP before dV. Paired, dP(j + 1) covers the exchange of dS(j), and dV the
reading of dQ(j). The serial order is for where tensor memory or shared memory is too small.

Products complete in the order of issue, which is why S needs no wait for P's reader, nor dQ for dS's. What must be
waited for besides follows from what dQ lies over in tensor memory (`plan.DqOver`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Int32

from jax_fa4.kernels.sm100.bwd import context as contexts
from jax_fa4.kernels.sm100.bwd import pair
from jax_fa4.kernels.sm100.bwd.barriers import LEADER, complete, phase, phase_before
from jax_fa4.kernels.sm100.bwd.context import Context
from jax_fa4.kernels.sm100.bwd.plan import BLOCK, DqOver
from jax_fa4.kernels.sm100.bwd.products import accumulator, multiply
from jax_fa4.kernels.sm100.context import tmem_fence

HALF = BLOCK // 2
"""Queries of which P, or dS, lies together in tensor memory."""


@dataclasses.dataclass(frozen=True)
class Operands:
    """Operands as descriptors (last mode: stage), or addresses in tensor memory (a pair: one for each half)."""

    k: Any
    q: Any
    v: Any
    do: Any
    dv_p: Any
    dv_do: Any
    dk_ds: Any
    dk_q: Any
    dq_ds: Any
    dq_k: Any

    @classmethod
    def make(cls, context: Context) -> Operands:
        plan, products, shared, dtype = context.plan, context.products, context.shared, context.dtype

        def view(tensor, layout):
            return cute.make_tensor(cute.recast_ptr(tensor.iterator, layout.inner), layout.outer)

        def left(product, tensor, depth):
            layout = blackwell.make_smem_layout_a(product, (*product.shape_mnk[:2], depth), dtype, 1)
            return product.make_fragment_A(view(tensor, layout))

        def right(product, tensor, depth, stages=1):
            layout = blackwell.make_smem_layout_b(product, (*product.shape_mnk[:2], depth), dtype, stages)
            return product.make_fragment_B(view(tensor, layout))

        def computed(product, tensor, start, distance):
            if plan.narrow:
                return left(product, tensor, BLOCK)[None, None, None, 0]
            layout = blackwell.make_smem_layout_a(product, (*product.shape_mnk[:2], HALF), dtype, 1)
            place = cute.make_tensor(context.tmem, layout.outer)
            part = product.get_slice(0).make_fragment_A(place)[None, None, None, 0]
            words = 32 // dtype.width
            columns = (start, start + distance)
            return tuple(cute.make_tensor(part.iterator + column * words, part.layout) for column in columns)

        p, s, tmem = products, shared, plan.tmem
        return cls(
            k=left(p.scores, s.k, plan.tile_d), q=right(p.scores, s.q, plan.tile_d, plan.q_stages),
            v=left(p.scores, s.v, plan.tile_e), do=right(p.scores, s.do, plan.tile_e, plan.do_stages),
            dv_p=computed(p.dv, s.p, tmem.scores, tmem.p_distance),
            dv_do=right(p.dv, s.do_columns, BLOCK, plan.do_stages),
            dk_ds=computed(p.dk, s.ds_out, tmem.dp, HALF), dk_q=right(p.dk, s.q_columns, BLOCK, plan.q_stages),
            dq_ds=left(p.dq, s.ds, plan.block_k), dq_k=right(p.dq, s.k_columns, plan.block_k),
        )  # fmt: skip


@cute.jit
def run(context: Context):
    """All tiles of this block."""
    plan, key_schedule, group = context.plan, context.schedule, context.spec.group
    operands = Operands.make(context)
    number, turn = contexts.first_number(plan), Int32(0)
    tiles_done, steps_done = Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        count = context.steps(tile).count(group)
        if count > 0:
            if context.rank == LEADER:
                _tile(context, operands, tiles_done, steps_done, count)
            else:
                pair.relay(context, steps_done, count)
            tiles_done += 1
            steps_done += count
        number = contexts.receive(context, turn)
        turn += 1


@cute.jit
def _tile(context: Context, operands: Operands, tiles_done, steps_done, count):
    """All products of the `tiles_done`th tile."""
    plan, pipes = context.plan, context.pipes
    _await(pipes.k, tiles_done)
    if cutlass.const_expr(plan.serial):
        _serial(context, operands, tiles_done, steps_done, count)
    elif cutlass.const_expr(plan.paired):
        _paired(context, operands, tiles_done, steps_done, count)
    else:
        _pipelined(context, operands, tiles_done, steps_done, count)
    complete(plan, pipes.dkv_full)
    for keys in (pipes.k, pipes.v, pipes.k_columns):
        _release(keys, tiles_done)


@cute.jit
def _pipelined(context: Context, operands: Operands, tile, number, count):
    """All steps of a tile, the first of which has this number."""
    _scores(context, operands, number, number)
    _await(context.pipes.v, tile)
    _dp(context, operands, number)
    _await_dkv(context, tile)
    _dv(context, operands, number, False)
    _release(context.pipes.do, number)
    for i in cutlass.range(1, count, unroll=1):
        _scores(context, operands, number + i, number + i - 1)
        _dk(context, operands, number + i - 1, i > 1)
        _dq(context, operands, number + i - 1, None)
        _dv(context, operands, number + i, True)
        _dp(context, operands, number + i)
        _release(context.pipes.do, number + i)
    _dk(context, operands, number + count - 1, count > 1)
    _dq(context, operands, number + count - 1, None)


@cute.jit
def _paired(context: Context, operands: Operands, tile, number, count):
    """As `_pipelined`, in the order for pairs."""
    _scores(context, operands, number, number)
    _await(context.pipes.v, tile)
    _dp(context, operands, number)
    _await_dkv(context, tile)
    _dv(context, operands, number, False)
    _await(context.pipes.k_columns, tile)
    for i in cutlass.range(1, count, unroll=1):
        _scores(context, operands, number + i, number + i - 1)
        _dk(context, operands, number + i - 1, i > 1)
        _dp(context, operands, number + i)
        _dq(context, operands, number + i - 1, number + i)
        _dv(context, operands, number + i, True)
    _dk(context, operands, number + count - 1, count > 1)
    _dq(context, operands, number + count - 1, None)


@cute.jit
def _serial(context: Context, operands: Operands, tile, number, count):
    """As `_pipelined`, step by step."""
    plan, pipes = context.plan, context.pipes
    _await(pipes.v, tile)
    _await_dkv(context, tile)
    if cutlass.const_expr(plan.paired):
        _await(pipes.k_columns, tile)
    for i in cutlass.range(count, unroll=1):
        _scores(context, operands, number + i, number + i)
        if cutlass.const_expr(plan.tmem.dq_over is DqOver.BOTH):
            pipes.p_full.wait(0, phase(number + i))
            tmem_fence("after")
        _dp(context, operands, number + i)
        _dv(context, operands, number + i, i > 0)
        if cutlass.const_expr(not plan.paired):
            _release(pipes.do, number + i)
        _dk(context, operands, number + i, i > 0)
        _dq(context, operands, number + i, None)


def _await(feed, number) -> None:
    feed.ring.consumer_wait(feed.full(number))


def _release(feed, number) -> None:
    """Frees a buffer when the products issued so far are complete."""
    if feed.own:
        feed.ring.consumer_release(feed.full(number))


def _await_dkv(context: Context, tile) -> None:
    """Waits until dK and dV of the tile before have been read."""
    context.pipes.dkv_empty.wait(0, phase_before(tile))
    tmem_fence("after")


def _await_dq(context: Context, number, *places: DqOver) -> None:
    """Waits until all dQ before this step's have been read, where dQ lies over one of these places."""
    if context.plan.tmem.dq_over in places:
        context.pipes.dq_empty.wait(0, phase_before(number))
        tmem_fence("after")


def _at(feed, number, operand):
    """An operand's stage for a step."""
    return operand[None, None, None, feed.full(number).index]


@cute.jit
def _scores(context: Context, operands: Operands, number, dq_issued):
    """S of a step; dQ of those before `dq_issued` has been issued."""
    plan, pipes, product = context.plan, context.pipes, context.products.scores
    _await(pipes.q, number)
    _await_dq(context, dq_issued, DqOver.BOTH, DqOver.SCORES)
    result = accumulator(product, context.tmem, plan.tmem.scores)
    multiply(product, result, operands.k[None, None, None, 0], _at(pipes.q, number, operands.q), False, number)
    complete(plan, pipes.scores_full)
    if cutlass.const_expr(plan.paired):
        _release(pipes.q, number)


@cute.jit
def _dp(context: Context, operands: Operands, number):
    plan, pipes, product = context.plan, context.pipes, context.products.scores
    _await(pipes.do, number)
    _await_dq(context, number, DqOver.DP)
    result = accumulator(product, context.tmem, plan.tmem.dp)
    multiply(product, result, operands.v[None, None, None, 0], _at(pipes.do, number, operands.do), False, number)
    complete(plan, pipes.dp_full)
    if cutlass.const_expr(plan.paired):
        _release(pipes.do, number)


@cute.jit
def _dv(context: Context, operands: Operands, number, accumulate):
    plan, pipes, product = context.plan, context.pipes, context.products.dv
    _await(pipes.do_columns, number)
    pipes.p_full.wait(0, phase(number))
    tmem_fence("after")
    result = accumulator(product, context.tmem, plan.tmem.dv)
    multiply(product, result, operands.dv_p, _at(pipes.do_columns, number, operands.dv_do), accumulate, number)
    _release(pipes.do_columns, number)


@cute.jit
def _dk(context: Context, operands: Operands, number, accumulate):
    plan, pipes, product = context.plan, context.pipes, context.products.dk
    if cutlass.const_expr(plan.paired):
        _await(pipes.q_columns, number)
    pipes.ds_full.wait(0, phase(number))
    tmem_fence("after")
    result = accumulator(product, context.tmem, plan.tmem.dk)
    multiply(product, result, operands.dk_ds, _at(pipes.q_columns, number, operands.dk_q), accumulate, number)
    _release(pipes.q_columns if plan.paired else pipes.q, number)


@cute.jit
def _dq(context: Context, operands: Operands, number, after):
    """dQ of a step; `after` is the number of the next step where its S has been issued, which has waited for dQ."""
    plan, pipes, product = context.plan, context.pipes, context.products.dq
    _await_dq(context, number, DqOver.NOTHING, *([DqOver.SCORES] if after is None else []))
    if cutlass.const_expr(plan.paired):
        pair.await_exchange(context, number)
        pipes.peer_exchange.wait(0, phase(number))
    if cutlass.const_expr(plan.tmem.dq_over is DqOver.SCORES and after is not None):
        pipes.scores_read.wait(0, phase(after))
        tmem_fence("after")
    result = accumulator(product, context.tmem, plan.tmem.dq)
    multiply(product, result, operands.dq_ds[None, None, None, 0], operands.dq_k[None, None, None, 0], False, number)
    complete(plan, pipes.dq_full)
