"""Split-KV: rows whose keys were divided among CTAs, each of which left a partial result, are merged.

Each CTA leaves a normalised float32 O and an LSE. With w_i = exp(lse_i - lse), lse = log(sum of exp(lse_i)), O is the
sum of w_i O_i; the sink joins that sum here, once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4.kernels.common.entry import DTYPES
from jax_fa4.kernels.common.softmax import LN_2, LOG2_E, NEG_INF, exp2

ROWS = 4
"""Rows, one a warp, of a block of a combining kernel."""


@cute.jit
def combine_row(spec: cutlass.Constexpr, o: cute.Tensor, lse: cute.Tensor, parts: Int32, g, place: tuple):
    """One warp merges a row: partial `o` (column, part) and `lse` (part) to row `place` = (batch, row, head) of O and
    LSE, in the order of the parts."""
    batch, row, head = place
    lane = cute.arch.lane_idx()
    top = Float32(NEG_INF)
    for part in cutlass.range(parts, unroll=4):
        top = cute.arch.fmax(top, lse[part])
    total = Float32(0.0)
    if cutlass.const_expr(spec.sink):
        top = cute.arch.fmax(top, g.sinks[head])
    base = Float32(cutlass.select_(top == NEG_INF, Float32(0.0), top))
    if cutlass.const_expr(spec.sink):
        total = exp2((g.sinks[head] - base) * LOG2_E)
    columns = -(-spec.value_head_dim // 32)
    sums = cute.make_rmem_tensor((columns,), Float32)
    sums.fill(0.0)
    for part in cutlass.range(parts, unroll=4):
        weight = exp2((lse[part] - base) * LOG2_E)
        total += weight
        for i in cutlass.range_constexpr(columns):
            column = cutlass.min(lane + 32 * i, spec.value_head_dim - 1)
            sums[i] = sums[i] + weight * o[column, part]
    none = total == 0.0
    safe = Float32(cutlass.select_(none, Float32(1.0), total))
    inverse = Float32(1.0) / safe
    for i in cutlass.range_constexpr(columns):
        if lane + 32 * i < spec.value_head_dim:
            g.o[batch, row, head, lane + 32 * i] = (sums[i] * inverse).to(DTYPES[str(spec.out_dtype)])
    if lane == 0:
        result = base + cute.math.log2(safe, fastmath=True) * LN_2
        g.lse[batch, head, row] = Float32(cutlass.select_(none, Float32(NEG_INF), result))
