"""The kernel after the main one: scales dQ, rounds it, and brings it from accumulator order into rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from jax_fa4.kernels.common import softmax


@cute.kernel
def finish(
    product: cute.TiledMma,
    dq_accumulator: cute.Tensor,
    dq: cute.Tensor,
    plan: cutlass.Constexpr,
    scale: cutlass.Constexpr[float],
    drawn=None,
):
    """One tile of dQ, unless the main kernel has rounded it: (shares of each section, of how many) are `drawn`.

    As many threads as the consumers that made it, each with the registers that it had there.
    """
    if cutlass.const_expr(drawn is None):
        _finish(product, dq_accumulator, dq, plan, scale)
    else:
        _, heads, blocks, _ = dq_accumulator.shape
        block, head, batch = cute.arch.block_idx()
        last = ((batch * heads + head) * blocks + block + 1) * plan.dq_parts - 1
        section = last // drawn[1]
        if last - section * drawn[1] >= (drawn[0].iterator + section).load():
            _finish(product, dq_accumulator, dq, plan, scale)


@cute.jit
def _finish(product, dq_accumulator: cute.Tensor, dq: cute.Tensor, plan: cutlass.Constexpr,
            scale: cutlass.Constexpr[float]):  # fmt: skip
    block, head, batch = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    rows, columns, parts = plan.block_q, plan.dq_columns, plan.dq_parts
    source = cute.make_tensor(
        dq_accumulator[batch, head, block, None].iterator,
        cute.make_layout((4, 128, plan.dq_floats // (512 * parts), parts)),
    )[None, thread % 128, None, thread // 128]
    shape = (columns, rows) if plan.dq_transposed else (rows, columns)
    values = cute.make_rmem_tensor(product.partition_shape_C(shape), Float32)
    cute.autovec_copy(source, cute.make_tensor(values.iterator, cute.make_layout(source.shape)))
    for i in cutlass.range_constexpr(cute.size(values)):
        values[i] = values[i] * scale

    dtype = dq.element_type
    vector = 128 // dtype.width
    memory = cutlass.utils.SmemAllocator()
    shared = memory.allocate_tensor(dtype, cute.make_layout((rows, columns), stride=(columns + vector, 1)), 16)
    result = cute.make_rmem_tensor(values.shape, dtype)
    if cutlass.const_expr(dtype is Float32):
        result.store(values.load())
    else:
        softmax.convert_pairs(values, result)
    as_product = cute.make_tensor(shared.iterator, cute.make_layout(shape, stride=(1, columns + vector)))
    view = as_product if plan.dq_transposed else shared
    cute.autovec_copy(result, product.get_slice(thread).partition_C(view))
    cute.arch.sync_threads()

    per_row = columns // vector
    for i in cutlass.range_constexpr(rows * per_row // (128 * parts)):
        index = i * 128 * parts + thread
        row, column = index // per_row, index % per_row * vector
        query = block * rows + row
        if query < dq.shape[1] and column < dq.shape[3]:
            target = dq[batch, query, head, None]
            cute.autovec_copy(
                cute.make_tensor(shared.iterator + row * (columns + vector) + column, cute.make_layout((vector,))),
                cute.make_tensor((target.iterator + column).align(16), cute.make_layout((vector,))),
            )
