"""The mma role: one warp issues all five products of every step.

    S(j + 1) = K Q^T
    dK += dS^T Q(j), dQ(j) = dS K              when dS(j) is stored
    dV += P^T dO(j + 1)                        when P(j + 1) is stored
    dP(j + 1) = V dO^T                         unless dQ has columns of its own: when dQ(j) has been read

The exponentials of step j + 1 run beside the products of dS(j), and dQ(j) is read beside dV: in timed runs of the
software GPU 5 % faster than with dP before dV. Products complete in the order of issue, which is why S needs no wait
for P's reader, nor dQ for dS's. Where tensor memory is too small for that (the serial form), a step's products follow
one another: S, dP and dV, dK and dQ.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from jax_fa4.kernels.common import key_tiles
from jax_fa4.kernels.common.pipelines import buffer
from jax_fa4.kernels.sm100.bwd.context import HALF, Context, phase, phase_before
from jax_fa4.kernels.sm100.bwd.plan import BLOCK
from jax_fa4.kernels.sm100.context import commit, tmem_fence

# Products over the queries of one half.
_STEPS = HALF // 16


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

        def left(product, tensor, columns, depth):
            layout = blackwell.make_smem_layout_a(product, (BLOCK, columns, depth), dtype, 1)
            return product.make_fragment_A(view(tensor, layout))

        def right(product, tensor, columns, depth, stages=1):
            layout = blackwell.make_smem_layout_b(product, (BLOCK, columns, depth), dtype, stages)
            return product.make_fragment_B(view(tensor, layout))

        def halves(product, width, start, distance):
            layout = blackwell.make_smem_layout_a(product, (BLOCK, width, HALF), dtype, 1)
            place = cute.make_tensor(context.tmem, layout.outer)
            part = product.get_slice(0).make_fragment_A(place)[None, None, None, 0]
            words = 32 // dtype.width
            columns = (start, start + distance)
            return tuple(cute.make_tensor(part.iterator + column * words, part.layout) for column in columns)

        p, d, e, tmem = products, plan.tile_d, plan.tile_e, plan.tmem
        return cls(
            k=left(p.scores, shared.k, BLOCK, d), q=right(p.scores, shared.q, BLOCK, d, plan.q_stages),
            v=left(p.scores, shared.v, BLOCK, e), do=right(p.scores, shared.do, BLOCK, e, plan.do_stages),
            dv_p=halves(p.dv, e, tmem.scores, tmem.p_distance), dv_do=right(p.dv, shared.do, e, BLOCK, plan.do_stages),
            dk_ds=halves(p.dk, d, tmem.dp, HALF), dk_q=right(p.dk, shared.q, d, BLOCK, plan.q_stages),
            dq_ds=left(p.dq, shared.ds, d, BLOCK), dq_k=right(p.dq, shared.k, d, BLOCK),
        )  # fmt: skip


def _issue(context: Context, product, column: int, a, b, accumulate) -> None:
    """accumulator at `column` (+)= a b over all of the operands' depth; `a` is a tensor or the two halves of one."""
    product = cute.make_tiled_mma(product.op)  # of its own: `set` changes it
    columns = product.shape_mnk[1]
    fragment = product.get_slice(0).make_fragment_C(product.partition_shape_C((BLOCK, columns)))
    accumulator = cute.make_tensor(context.tmem + column, fragment.layout)
    for i in range(cute.size(b, mode=[2])):
        left = a[i // _STEPS][None, None, i % _STEPS] if isinstance(a, tuple) else a[None, None, i]
        product.set(tcgen05.Field.ACCUMULATE, accumulate if i == 0 else True)
        cute.gemm(product, accumulator, left, b[None, None, i], accumulator)


@cute.jit
def run(context: Context):
    """All tiles of this block."""
    pipes, key_schedule, group = context.pipes, context.schedule, context.spec.group
    operands = Operands.make(context)
    number, turn, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        count = key_tiles.steps(context.kernel, context.g, context.dims, tile).count(group)
        if count > 0:
            keys = buffer(tiles_done, 1)
            pipes.k.consumer_wait(keys)
            if cutlass.const_expr(context.plan.tmem.serial):
                _serial(context, operands, keys, steps_done, count)
            else:
                _pipelined(context, operands, keys, steps_done, count)
            commit(pipes.dkv_full, 0)
            pipes.k.consumer_release(keys)
            pipes.v.consumer_release(keys)
            tiles_done += 1
            steps_done += count
        number = key_tiles.receive(pipes, context.shared, turn)
        turn += 1


@cute.jit
def _pipelined(context: Context, operands: Operands, keys, number, count):
    """All steps of a tile, the first of which has this number; `keys` is the state of K's and V's buffers."""
    _scores(context, operands, number)
    context.pipes.v.consumer_wait(keys)
    _dp(context, operands, number)
    _await_dkv(context, keys)
    _dv(context, operands, number, False)
    _release_do(context, number)
    for i in cutlass.range(1, count, unroll=1):
        _scores(context, operands, number + i)
        _dk_dq(context, operands, number + i - 1, i > 1)
        _dv(context, operands, number + i, True)
        _dp(context, operands, number + i)
        _release_do(context, number + i)
    _dk_dq(context, operands, number + count - 1, count > 1)


@cute.jit
def _serial(context: Context, operands: Operands, keys, number, count):
    """As `_pipelined`, step by step."""
    context.pipes.v.consumer_wait(keys)
    _await_dkv(context, keys)
    for i in cutlass.range(count, unroll=1):
        _scores(context, operands, number + i)
        context.pipes.p_full.wait(0, phase(number + i))
        tmem_fence("after")
        _dp(context, operands, number + i)
        _dv(context, operands, number + i, i > 0)
        _release_do(context, number + i)
        _dk_dq(context, operands, number + i, i > 0)


def _release_do(context: Context, number) -> None:
    """Frees dO of a step when the products issued so far are complete."""
    context.pipes.do.consumer_release(buffer(number, context.plan.do_stages))


def _await_dkv(context: Context, keys) -> None:
    """Waits until dK and dV of the tile before have been read."""
    context.pipes.dkv_empty.wait(0, keys.phase ^ 1)
    tmem_fence("after")


def _await_dq(context: Context, number) -> None:
    """Waits until dQ of the step before has been read."""
    context.pipes.dq_empty.wait(0, phase_before(number))
    tmem_fence("after")


@cute.jit
def _scores(context: Context, operands: Operands, number):
    plan, pipes = context.plan, context.pipes
    q = buffer(number, plan.q_stages)
    pipes.q.consumer_wait(q)
    if cutlass.const_expr(plan.tmem.serial):
        _await_dq(context, number)
    _issue(context, context.products.scores, plan.tmem.scores, operands.k[None, None, None, 0],
           operands.q[None, None, None, q.index], False)
    commit(pipes.scores_full, 0)


@cute.jit
def _dp(context: Context, operands: Operands, number):
    plan, pipes = context.plan, context.pipes
    do = buffer(number, plan.do_stages)
    pipes.do.consumer_wait(do)
    if cutlass.const_expr(not plan.tmem.apart and not plan.tmem.serial):
        _await_dq(context, number)
    _issue(context, context.products.scores, plan.tmem.dp, operands.v[None, None, None, 0],
           operands.do[None, None, None, do.index], False)
    commit(pipes.dp_full, 0)


@cute.jit
def _dv(context: Context, operands: Operands, number, accumulate):
    plan, pipes = context.plan, context.pipes
    do = buffer(number, plan.do_stages)
    pipes.do.consumer_wait(do)
    pipes.p_full.wait(0, phase(number))
    tmem_fence("after")
    _issue(context, context.products.dv, plan.tmem.dv, operands.dv_p, operands.dv_do[None, None, None, do.index],
           accumulate)


@cute.jit
def _dk_dq(context: Context, operands: Operands, number, accumulate):
    plan, pipes = context.plan, context.pipes
    q = buffer(number, plan.q_stages)
    pipes.ds_full.wait(0, phase(number))
    tmem_fence("after")
    _issue(context, context.products.dk, plan.tmem.dk, operands.dk_ds, operands.dk_q[None, None, None, q.index],
           accumulate)
    pipes.q.consumer_release(q)
    if cutlass.const_expr(plan.tmem.apart):
        _await_dq(context, number)
    _issue(context, context.products.dq, plan.tmem.dq, operands.dq_ds[None, None, None, 0],
           operands.dq_k[None, None, None, 0], False)
    commit(pipes.dq_full, 0)
