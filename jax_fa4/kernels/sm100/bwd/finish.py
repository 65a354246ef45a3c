"""The kernel after the main one: scales dQ, rounds it, and brings it from accumulator order into rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from jax_fa4.kernels.common import softmax
from jax_fa4.kernels.sm100.bwd.plan import BLOCK
from jax_fa4.kernels.sm100.bwd.reduce import accumulator_layout

THREADS = 256


@cute.kernel
def finish(dq_accumulator: cute.Tensor, dq: cute.Tensor, plan: cutlass.Constexpr, scale: cutlass.Constexpr[float]):
    """One tile of dQ.

    A thread moves 16 bytes of the result. Neighbouring threads take neighbouring columns: results leave in whole lines,
    and the two rows of a warp read whole sectors.
    """
    block, head, batch = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    tile = cute.make_tensor(dq_accumulator[batch, head, block, None].iterator, accumulator_layout(plan))
    dtype = dq.element_type
    width = 128 // dtype.width
    per_row = plan.tile_d // width
    for i in cutlass.range_constexpr(BLOCK * per_row // THREADS):
        index = i * THREADS + thread
        row, column = index // per_row, index % per_row * width
        query = block * BLOCK + row
        if query < dq.shape[1] and column < dq.shape[3]:
            values = cute.make_rmem_tensor((4, width // 4), Float32)
            for j in cutlass.range_constexpr(width // 4):
                source = tile.iterator + cute.crd2idx((row, column + 4 * j), tile.layout)
                cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(4)), values[None, j])
            for j in cutlass.range_constexpr(width):
                values[j] = values[j] * scale
            result = cute.make_rmem_tensor((width,), dtype)
            if cutlass.const_expr(dtype is Float32):
                result.store(cute.make_tensor(values.iterator, result.layout).load())
            else:
                softmax.convert_pairs(values, result)
            target = dq[batch, query, head, None]
            cute.autovec_copy(result, cute.make_tensor((target.iterator + column).align(16), cute.make_layout(width)))
