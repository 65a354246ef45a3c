"""The kernel before the main one: zeroes the dQ accumulator and its counters, and brings LSE and delta into shape."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4.kernels.common import softmax

THREADS = 256


@cute.kernel
def prepare(
    g,
    rows: cutlass.Constexpr[int],
    floats: cutlass.Constexpr[int],
    deterministic: cutlass.Constexpr[bool],
    beforehand=None,
):
    """One block of query rows of one head. The accumulator is zeroed where `beforehand` says, a `dq_zeros.Beforehand`.

    `lse_log2` gets LSE in units of log 2, +inf where a row has no key or does not exist, so that exp2(x - it) is 0;
    `delta_rows` gets delta, 0 where a row does not exist.
    """
    block, head, batch = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    number = batch * g.lse.shape[1] + head
    if cutlass.const_expr(beforehand is None):
        clear(g.dq_accumulator[batch, head, block, None], thread, floats)
    else:
        if number < beforehand.heads:
            clear(g.dq_accumulator[batch, head, block, None], thread, floats)
        if thread + block == 0:
            g.dq_zeroed[batch, head] = cutlass.select_(number < beforehand.sections, beforehand.shares, Int32(0))
    if cutlass.const_expr(hasattr(g, "dq_drawn")):
        if thread + block == 0:
            g.dq_done[batch, head] = Int32(0)
            g.dq_drawn[batch, head] = Int32(0)
    if thread < rows:
        row = block * rows + thread
        lse_log2, delta = Float32(-softmax.NEG_INF), Float32(0.0)
        if row < g.lse.shape[2]:
            lse = g.lse[batch, head, row]
            lse_log2 = cutlass.select_(lse == softmax.NEG_INF, lse_log2, lse * softmax.LOG2_E)
            delta = g.delta[batch, head, row]
        g.lse_log2[batch, head, row] = lse_log2
        g.delta_rows[batch, head, row] = delta
    if thread == 0:
        if block + head + batch == 0:
            g.tile_counter[0] = Int32(0)
        if cutlass.const_expr(deterministic):
            g.dq_counter[batch, head, block] = Int32(0)


@cute.jit
def clear(tile: cute.Tensor, thread: Int32, floats: cutlass.Constexpr[int]):
    """Zeroes one tile of the accumulator."""
    zeros = cute.make_rmem_tensor((4,), Float32)
    zeros.fill(0.0)
    vectors = cute.make_tensor(tile.iterator, cute.make_layout((4, THREADS, floats // (4 * THREADS))))
    for i in cutlass.range_constexpr(floats // (4 * THREADS)):
        cute.autovec_copy(zeros, vectors[None, thread, i])
