"""The correction role: one warpgroup keeps O in step with the running maxima, and finishes it.

A thread owns a row of each query tile. While blocks go by it rescales O, when a row of its warp needs that at all; at
the end it divides O by the row sum and hands it to the epilogue through shared memory, or writes float32 O to global
memory itself.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from jax_fa4.kernels.sm100 import dispatch
from jax_fa4.kernels.sm100.context import (
    SCALE_BARRIER,
    Context,
    arrive_leader,
    arrive_warp,
    finish_tmem_stores,
    products,
    read_tmem,
    result_of,
    tmem_fence,
)
from jax_fa4.kernels.sm100.plans import BLOCK_Q, SLOTS

# Columns of O in registers at a time, and 16-bit elements of a 16-byte store.
_COLUMNS = 16
_VECTOR = 8


@cute.jit
def run(context: Context):
    plan, barriers = context.plan, context.barriers
    row = cute.arch.thread_idx()[0] % BLOCK_Q
    turn, output_phase, tile_phase = Int32(0), Int32(0), Int32(0)
    for tile in cutlass.range_constexpr(plan.q_tiles):
        arrive_leader(context, barriers.p_full, tile)  # O is free for a tile's first product
    number, done, read = dispatch.first(context), Int32(0), Int32(0)
    while number < context.work.count:
        work = context.work.at(number)
        visits, cursor = context.visits(work, read)
        _, cursor = visits.next(cursor)
        for step in cutlass.range(1, visits.count, unroll=1):
            visit, cursor = visits.next(cursor)
            for tile in cutlass.range_constexpr(plan.q_tiles):
                if visits.has(tile, visit) & (visit.block != visits.tiles[tile].end - 1):
                    slot = tile if cutlass.const_expr(plan.q_tiles == 2) else (turn + step) % SLOTS
                    if cutlass.const_expr(plan.q_tiles == 1):
                        _await_output(context, output_phase)
                        output_phase ^= 1
                    _rescale(context, tile, slot, row)
        turn += visits.count
        for tile in cutlass.range_constexpr(plan.q_tiles):
            _finish(context, work, tile, row, tile_phase, output_phase)
            slot = tile if cutlass.const_expr(plan.q_tiles == 2) else turn % SLOTS
            arrive_leader(context, barriers.p_full, slot)
        output_phase ^= 1
        tile_phase ^= 1
        read = cursor.read
        number, done = dispatch.following(context, number, done)


@cute.jit
def _await_output(context: Context, phase):
    context.barriers.o_full.wait(0, phase)


@cute.jit
def _rescale(context: Context, tile: cutlass.Constexpr, slot, row):
    """Scales O by the factor that softmax mailed, and lets mma go on."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
    cute.arch.barrier(barrier_id=SCALE_BARRIER + slot * 4 + warp, number_of_threads=64)
    tmem_fence("after")
    scale = context.shared.scale[slot, row]
    if cute.arch.vote_any_sync(scale < 1.0):
        load, t_parts = _parts(context, tile, row, tcgen05.copy.Ld32x32bOp, _COLUMNS)
        store, t_targets = _parts(context, tile, row, tcgen05.copy.St32x32bOp, _COLUMNS)
        for i in cutlass.range_constexpr(context.plan.value_head_dim // _COLUMNS):
            values = cute.make_rmem_tensor(load.partition_D(_coordinates(_COLUMNS)).shape, Float32)
            read_tmem(t_parts[i], values)
            _scale(values, scale)
            cute.copy(store, values, t_targets[i])
        finish_tmem_stores()
    arrive_leader(context, context.barriers.p_full, slot)


@cute.jit
def _finish(context: Context, work, tile: cutlass.Constexpr, row, tile_phase, output_phase):
    """Normalises a finished tile's O and sends it on."""
    barriers = context.barriers
    barriers.inverse_full.wait(tile, tile_phase)
    inverse = context.shared.inverse[tile, row]
    arrive_warp(barriers.inverse_empty, tile)
    barriers.o_full.wait(tile, output_phase)
    tmem_fence("after")
    if cutlass.const_expr(context.plan.float32_out):
        _store_global(context, work, tile, row, inverse)
    else:
        _store_shared(context, tile, row, inverse, tile_phase)


@cute.jit
def _store_global(context: Context, work, tile: cutlass.Constexpr, row, inverse):
    """O of a tile in float32 from registers to global memory; a thread writes its row."""
    (q_row, head, batch), exists = result_of(context, work, tile, row)
    g_row = context.memory.o[q_row, None, head, batch]
    load, t_parts = _parts(context, tile, row, tcgen05.copy.Ld32x32bOp, _COLUMNS)
    for i in cutlass.range_constexpr(context.plan.value_head_dim // _COLUMNS):
        values = cute.make_rmem_tensor(load.partition_D(_coordinates(_COLUMNS)).shape, Float32)
        read_tmem(t_parts[i], values)
        _scale(values, inverse)
        vectors = cute.make_tensor(values.iterator, cute.make_layout((4, _COLUMNS // 4)))
        if exists:
            for j in cutlass.range_constexpr(_COLUMNS // 4):
                column = i * _COLUMNS + j * 4
                if cutlass.const_expr(column < context.spec.value_head_dim):
                    target = cute.make_tensor((g_row.iterator + column).align(16), cute.make_layout(4))
                    cute.autovec_copy(vectors[None, j], target)
    tmem_fence("before")


@cute.jit
def _store_shared(context: Context, tile: cutlass.Constexpr, row, inverse, phase):
    """O of a tile through registers, scaled and rounded, to shared memory for the epilogue."""
    plan, barriers = context.plan, context.barriers
    if cutlass.const_expr(not plan.o_over_q):
        barriers.o_store_empty.wait(tile, phase ^ 1)
    load, t_parts = _parts(context, tile, row, tcgen05.copy.Ld32x32bOp, _COLUMNS)
    for i in cutlass.range_constexpr(plan.value_head_dim // _COLUMNS):
        values = cute.make_rmem_tensor(load.partition_D(_coordinates(_COLUMNS)).shape, Float32)
        read_tmem(t_parts[i], values)
        _scale(values, inverse)
        rounded = cute.make_rmem_tensor((_VECTOR, _COLUMNS // _VECTOR), context.dtype)
        rounded.store(cute.make_tensor(values.iterator, rounded.layout).load().to(context.dtype))
        for j in cutlass.range_constexpr(_COLUMNS // _VECTOR):
            cute.autovec_copy(rounded[None, j], _shared_vector(context, tile, row, i * _COLUMNS + j * _VECTOR))
    tmem_fence("before")
    cute.arch.fence_view_async_shared()
    arrive_warp(barriers.o_store_full, tile)


def _shared_vector(context: Context, tile: int, row, column: int) -> cute.Tensor:
    """Eight columns of a row of O in swizzled shared memory.

    The swizzle is written out, the row's part and the column's apart: a tile then needs eight addresses and constant
    offsets, where a swizzled view would keep an address for each vector.
    """
    layout = context.o_layout
    row_bytes = cute.crd2idx((row, 0, 0), layout.outer) * 2
    column_bytes = cute.crd2idx((0, column, tile), layout.outer) * 2
    bits, base, shift = layout.inner.num_bits, layout.inner.num_base, layout.inner.num_shift
    key = (row_bytes >> shift) & (((1 << bits) - 1) << base)
    within = column_bytes & (((1 << bits) - 1) << base)
    offset = row_bytes + (key ^ within) + (column_bytes - within)
    address = context.shared.o.iterator.toint() + offset
    vector = cute.make_ptr(context.dtype, address, cute.AddressSpace.smem, assumed_align=2 * _VECTOR)
    return cute.make_tensor(vector, cute.make_layout(_VECTOR))


def _coordinates(columns: int):
    return cute.make_identity_tensor((BLOCK_Q, columns))


def _parts(context: Context, tile: int, row, operation, columns: int):
    """A thread's copy between tensor memory and registers, and its row of O in parts of so many columns.

    The thread's address is found once and the parts are constant distances from it: addresses are uniform registers.
    """
    o = products(context, tile)[(None, None), 0, 0]
    part = cute.make_tensor(o.iterator, cute.composition(o.layout, cute.make_layout((BLOCK_Q, columns))))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(operation(tcgen05.copy.Repetition(columns)), Float32), part)
    copy = copy.get_slice(row)
    first = copy.partition_S(part) if operation is tcgen05.copy.Ld32x32bOp else copy.partition_D(part)
    count = context.plan.value_head_dim // columns
    return copy, [cute.make_tensor(first.iterator + i * columns, first.layout) for i in range(count)]


def _scale(values, factor: Float32) -> None:
    for i in range(0, cute.size(values), 2):
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2((values[i], values[i + 1]), (factor, factor))
