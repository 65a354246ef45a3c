"""dK and dV of a finished tile, from tensor memory to global memory; a thread writes its key's row, or half of it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from jax_fa4.kernels.common import softmax
from jax_fa4.kernels.sm100.bwd.barriers import phase
from jax_fa4.kernels.sm100.bwd.context import Context
from jax_fa4.kernels.sm100.bwd.memory import load_columns
from jax_fa4.kernels.sm100.context import tmem_fence


@cute.jit
def run(context: Context, place, tile, count, tiles_done):
    """Writes dV and dK, which gets the scale of the scores; zeros if no query sees the tile (`count` is 0)."""
    tmem, g = context.plan.tmem, context.g
    if count > 0:
        context.pipes.dkv_full.wait(0, phase(tiles_done))
        tmem_fence("after")
    for output, column, columns, factor in (
        (g.dv, tmem.dv, tmem.dv_columns, 1.0), (g.dk, tmem.dk, tmem.dk_columns, context.spec.scale),
    ):  # fmt: skip
        width = 16 if columns % 64 else 32
        for part in cutlass.range_constexpr(columns // (2 * width)):  # the two warpgroups take turns
            _write(context, place, (tile, count), output, (column, columns, part, width, factor))


@cute.jit
def _write(context: Context, place, which, output: cute.Tensor, source):
    """Two parts of an accumulator, one by each warpgroup.

    `source` is (its column, how many, number of the two parts, columns of each, factor).
    """
    tile, count = which
    column, columns, part, width, factor = source
    start = (2 * part + place.group) * width
    rounded = cute.make_rmem_tensor((width,), output.element_type)
    rounded.fill(0.0)
    if count > 0:
        values = load_columns(context.tmem, column + start, width, place.warp)
        for i in cutlass.range_constexpr(width):
            values[i] = values[i] * factor
        if cutlass.const_expr(output.element_type is Float32):
            rounded.store(cute.make_tensor(values.iterator, rounded.layout).load())
        else:
            softmax.convert_pairs(values, rounded)
    key = context.first_key(tile) + place.key
    if cutlass.const_expr(context.plan.narrow):
        start += place.panel * columns  # of a key's two lanes the second has the second half of the columns
    vector = 128 // output.element_type.width
    if key < output.shape[1]:
        row = output[tile.batch, key, tile.head, None]
        for i in cutlass.range_constexpr(width // vector):
            if start + i * vector < output.shape[3]:
                target = (row.iterator + start + i * vector).align(16)
                cute.autovec_copy(
                    cute.make_tensor(rounded.iterator + i * vector, cute.make_layout(vector)),
                    cute.make_tensor(target, cute.make_layout(vector)),
                )
