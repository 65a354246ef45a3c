"""The mma role: one warp issues all five products of every step; in a pair the leader's, for both CTAs.

    one CTA                 pair                              narrow pair
    S(j + 1) = K Q^T        S(j + 1)                          S(j + 1)
    dK += dS^T Q(j)         dK, of dS(j)                      dP(j + 1)
    dQ(j) = dS K            dP(j + 1)                         dK, of dS(j)
    dV += P^T dO(j + 1)     dQ(j): dS has come from both      dQ(j)
    dP(j + 1) = V dO^T      dV, of P(j + 1)                   dV, of P(j + 1)

The exponentials of step j + 1 run beside the products of dS(j). Of one CTA, dQ(j) is read beside dV: in timed runs of
the software GPU 5 % faster than with dP before dV. In a pair dP(j + 1) covers the exchange of dS(j), and dV the reading
of dQ(j). In a narrow pair Q and its columns share buffers, and so do dO and its: between the two products of either
comes another, beside which the next are loaded. There dP may overtake dK, as dS lies in shared memory.

Products complete in the order of issue, which is why S needs no wait for P's reader, nor dQ for dS's. A tile's first dV
needs none for the dV and dK before: the warps that store its P have read those. What must be waited for besides follows
from what dQ lies over in tensor memory (`plan.DqOver`).
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
from jax_fa4.kernels.sm100.bwd.barriers import LEADER, Feed, complete, phase, phase_before
from jax_fa4.kernels.sm100.bwd.context import Context
from jax_fa4.kernels.sm100.bwd.plan import BLOCK, DqOver
from jax_fa4.kernels.sm100.bwd.products import accumulator, multiply
from jax_fa4.kernels.sm100.context import tmem_fence

HALF = BLOCK // 2
"""Queries of which P, or dS, lies together in tensor memory."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """A product of a step: its operands, as descriptors or as addresses in tensor memory, and where its result lies.

    Attributes:
      left: K, V, P or dS; P and dS of a pair in tensor memory as two halves.
      right: what the `feed` brings (last mode: buffer).
      column: of tensor memory.
      frees: whether the feed's buffers have no more readers after it.
    """

    product: cute.TiledMma
    left: Any
    right: cute.Tensor
    feed: Feed
    column: int
    frees: bool


@dataclasses.dataclass(frozen=True)
class Operands:
    """The products of a step; dQ's operands stay where they are."""

    scores: Factors
    dp: Factors
    dv: Factors
    dk: Factors
    dq_ds: cute.Tensor
    dq_k: cute.Tensor

    @classmethod
    def make(cls, context: Context) -> Operands:
        plan, products, shared, dtype = context.plan, context.products, context.shared, context.dtype

        def view(tensor, layout):
            return cute.make_tensor(cute.recast_ptr(tensor.iterator, layout.inner), layout.outer)

        def left(product, tensor, depth):
            layout = blackwell.make_smem_layout_a(product, (*product.shape_mnk[:2], depth), dtype, 1)
            return product.make_fragment_A(view(tensor, layout))[None, None, None, 0]

        def right(product, tensor, depth, stages=1):
            layout = blackwell.make_smem_layout_b(product, (*product.shape_mnk[:2], depth), dtype, stages)
            return product.make_fragment_B(view(tensor, layout))

        def computed(product, tensor, start, distance):
            if plan.narrow:
                return left(product, tensor, BLOCK)
            layout = blackwell.make_smem_layout_a(product, (*product.shape_mnk[:2], HALF), dtype, 1)
            place = cute.make_tensor(context.tmem, layout.outer)
            part = product.get_slice(0).make_fragment_A(place)[None, None, None, 0]
            words = 32 // dtype.width
            columns = (start, start + distance)
            return tuple(cute.make_tensor(part.iterator + column * words, part.layout) for column in columns)

        def factors(product, operand, name, depth, column, frees):
            feed = getattr(context.pipes, name)
            brought = right(product, getattr(shared, name), depth // feed.parts, feed.tiles * feed.parts)
            return Factors(product, operand, brought, feed, column, frees)

        p, s, tmem, pair_frees = products, shared, plan.tmem, plan.paired
        return cls(
            scores=factors(p.scores, left(p.scores, s.k, plan.tile_d), "q", plan.tile_d, tmem.scores, pair_frees),
            dp=factors(p.scores, left(p.scores, s.v, plan.tile_e), "do", plan.tile_e, tmem.dp, pair_frees),
            dv=factors(
                p.dv, computed(p.dv, s.p, tmem.scores, tmem.p_distance), "do_columns", BLOCK, tmem.dv, pair_frees
            ),
            dk=factors(p.dk, computed(p.dk, s.ds_out, tmem.dp, HALF), "q_columns", BLOCK, tmem.dk, True),
            dq_ds=left(p.dq, s.ds, plan.block_k),
            dq_k=right(p.dq, s.k_columns, plan.block_k)[None, None, None, 0],
        )


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
    if cutlass.const_expr(plan.paired):
        _paired(context, operands, tiles_done, steps_done, count)
    else:
        _single(context, operands, tiles_done, steps_done, count)
    _release(pipes.k_columns if plan.paired else pipes.k, tiles_done)
    complete(plan, pipes.dkv_full)  # the last: who waits for it before it ends may end, nothing reports to its barriers


@cute.jit
def _single(context: Context, operands: Operands, tile, number, count):
    """All steps of a tile, the first of which has this number."""
    _scores(context, operands, number, True)
    _await(context.pipes.v, tile)
    _dp(context, operands, number, first=True)
    _dv(context, operands, number, False)
    _release(context.pipes.do, number)
    for i in cutlass.range(1, count, unroll=1):
        _scores(context, operands, number + i, False)
        _dk(context, operands, number + i - 1, i > 1)
        _dq(context, operands, number + i - 1, None)
        _dv(context, operands, number + i, True)
        _dp(context, operands, number + i)
        _release(context.pipes.do, number + i)
    _release(context.pipes.v, tile)
    _dk(context, operands, number + count - 1, count > 1, at_end=True)
    _dq(context, operands, number + count - 1, None)


@cute.jit
def _paired(context: Context, operands: Operands, tile, number, count):
    """As `_single`, in the order for pairs."""
    _scores(context, operands, number, True)
    _await(context.pipes.v, tile)
    _dp(context, operands, number, first=True)
    _dv(context, operands, number, False)
    _await(context.pipes.k_columns, tile)
    for i in cutlass.range(1, count, unroll=1):
        _scores(context, operands, number + i, False)
        if cutlass.const_expr(context.plan.narrow):
            _dp(context, operands, number + i)
            _dk(context, operands, number + i - 1, i > 1)
        else:
            _dk(context, operands, number + i - 1, i > 1)
            _dp(context, operands, number + i)
        _dq(context, operands, number + i - 1, number + i)
        _dv(context, operands, number + i, True)
    _release(context.pipes.k, tile)
    _release(context.pipes.v, tile)
    _dk(context, operands, number + count - 1, count > 1, at_end=True)
    _dq(context, operands, number + count - 1, None)


def _await(feed, number) -> None:
    feed.ring.consumer_wait(feed.full(number))


def _release(feed, number) -> None:
    """Frees a buffer when the products issued so far are complete."""
    feed.ring.consumer_release(feed.full(number))


def _await_dq(context: Context, number, *places: DqOver) -> None:
    """Waits until all dQ before this step's have been read, where dQ lies over one of these places."""
    if context.plan.tmem.dq_over in places:
        context.pipes.dq_empty.wait(0, phase_before(number))
        tmem_fence("after")


def _multiply(context: Context, factors: Factors, number, accumulate=False, at_end=False) -> None:
    """The product of a step, part by part as the load role brings them. `at_end`: see `Feed`."""
    result = accumulator(factors.product, context.tmem, factors.column)
    for part in range(factors.feed.parts):
        state = factors.feed.full(number, part, at_end)
        factors.feed.ring.consumer_wait(state)
        right = (factors.right[None, None, None, state.index], part)
        multiply(factors.product, result, factors.left, right, accumulate if part == 0 else True, number)
        if factors.frees:
            factors.feed.ring.consumer_release(state)


@cute.jit
def _scores(context: Context, operands: Operands, number, first: cutlass.Constexpr):
    """S of a step; `first` of its tile: dQ of all before has been issued, else of all but the last."""
    _await_dq(context, number if first else number - 1, DqOver.SCORES)
    _multiply(context, operands.scores, number, at_end=first)
    complete(context.plan, context.pipes.scores_full)


@cute.jit
def _dp(context: Context, operands: Operands, number, first: cutlass.Constexpr = False):
    """dP of a step; at the `first` of a tile the last dK and dQ have waited for what it overwrites in a narrow pair."""
    plan, pipes = context.plan, context.pipes
    _await_dq(context, number, DqOver.DP)
    if cutlass.const_expr(plan.narrow and not first):
        pipes.ds_full.wait(0, phase_before(number))  # dP of the step before has been read
        tmem_fence("after")
    _multiply(context, operands.dp, number)
    complete(plan, pipes.dp_full)


@cute.jit
def _dv(context: Context, operands: Operands, number, accumulate):
    context.pipes.p_full.wait(0, phase(number))
    tmem_fence("after")
    _multiply(context, operands.dv, number, accumulate)


@cute.jit
def _dk(context: Context, operands: Operands, number, accumulate, at_end: cutlass.Constexpr = False):
    """dK of a step. In a narrow pair dS lies in shared memory, and dP of the next step has waited for it before."""
    narrow = context.plan.narrow
    if cutlass.const_expr(at_end or not narrow):
        context.pipes.ds_full.wait(0, phase(number))
    if cutlass.const_expr(not narrow):
        tmem_fence("after")
    _multiply(context, operands.dk, number, accumulate, at_end)


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
    multiply(product, result, operands.dq_ds, operands.dq_k, False, number)
    complete(plan, pipes.dq_full)
