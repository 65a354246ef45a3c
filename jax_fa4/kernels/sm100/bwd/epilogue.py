"""dK and dV of a finished tile, from tensor memory to global memory; a thread writes its key's row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from jax_fa4.kernels.common import softmax
from jax_fa4.kernels.sm100.bwd.context import Context, load_columns, phase
from jax_fa4.kernels.sm100.bwd.plan import BLOCK
from jax_fa4.kernels.sm100.context import arrive_warp, tmem_fence

# Columns in registers at a time; the two warpgroups take turns at them.
_COLUMNS = 32


@cute.jit
def run(context: Context, place, tile, count, tiles_done):
    """Writes dV and dK, which gets the scale of the scores; zeros if no query sees the tile (`count` is 0)."""
    plan, tmem = context.plan, context.plan.tmem
    if count > 0:
        context.pipes.dkv_full.wait(0, phase(tiles_done))
        tmem_fence("after")
    for part in cutlass.range_constexpr(plan.tile_e // (2 * _COLUMNS)):
        _write(context, place, (tile, count), context.g.dv, (tmem.dv, part, 1.0))
    for part in cutlass.range_constexpr(plan.tile_d // (2 * _COLUMNS)):
        _write(context, place, (tile, count), context.g.dk, (tmem.dk, part, context.spec.scale))
    tmem_fence("before")
    if count > 0:
        arrive_warp(context.pipes.dkv_empty, 0)


@cute.jit
def _write(context: Context, place, which, output: cute.Tensor, source):
    """Two parts of an accumulator, one by each warpgroup; `source` is (its column, number of the pair, factor)."""
    tile, count = which
    column, part, factor = source
    start = (2 * part + place.half) * _COLUMNS
    rounded = cute.make_rmem_tensor((_COLUMNS,), output.element_type)
    rounded.fill(0.0)
    if count > 0:
        values = load_columns(context, column + start, _COLUMNS, place.row)
        cute.arch.fence_view_async_tmem_load()
        for i in cutlass.range_constexpr(_COLUMNS):
            values[i] = values[i] * factor
        if cutlass.const_expr(output.element_type is Float32):
            rounded.store(cute.make_tensor(values.iterator, rounded.layout).load())
        else:
            softmax.convert_pairs(values, rounded)
    key = tile.block * BLOCK + place.row
    vector = 128 // output.element_type.width
    if key < output.shape[1]:
        row = output[tile.batch, key, tile.head, None]
        for i in cutlass.range_constexpr(_COLUMNS // vector):
            if start + i * vector < output.shape[3]:
                target = (row.iterator + start + i * vector).align(16)
                cute.autovec_copy(
                    cute.make_tensor(rounded.iterator + i * vector, cute.make_layout(vector)),
                    cute.make_tensor(target, cute.make_layout(vector)),
                )
