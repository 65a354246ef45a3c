"""The end of a tile: normalise O and write it and LSE from registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from jax_fa4.kernels.common import copies, softmax


def run(block):
    """Writes this thread's rows of O [B, S, H, E] and of LSE [B, H, S].

    Rows leave straight from registers, without a stop in shared memory: four lanes exchange words so that each holds 16
    contiguous bytes. So the next tile's loads never wait for this tile's stores, and the bounds are exact.
    """
    from jax_fa4.kernels.sm90.consumer import rows_view

    work, tile, geometry, rows = block.work, block.tile, block.geometry, block.rows
    kernel, lane, g, dims = work.kernel, work.lane, work.g, work.dims
    spec = kernel.spec
    sink = None
    if spec.sink:
        sink = [g.sinks[head] for head in block.heads]
    inverses, lses = work.statistics.finish(sink)
    output = rows_view(work.operand.o)
    quad = lane.column // 2
    for r in range(2):
        row, head = rows[r], block.heads[r]
        exists = row < dims.S
        live = row < geometry.q_length
        lse = lses[r]
        lse_row = (Int64(tile.batch) * dims.H + head) * dims.S + row
        address = g.lse.iterator.toint() + lse_row * 4
        lse = cutlass.select_(live, lse, sink[r] if sink is not None else Float32(softmax.NEG_INF))
        copies.store_words(address, [Float32(lse).bitcast(Uint32)], exists & (quad == 0))
        scale = cutlass.select_(live, inverses[r], Float32(0.0))
        element = ((Int64(tile.batch) * dims.S + row) * dims.H + head) * spec.value_head_dim
        values = [Float32(output[r, c] * scale) for c in range(cute.size(output, mode=[1]))]
        if spec.float32_out:
            _store_float32(g.o.iterator.toint() + element * 4, values, quad, exists, spec.value_head_dim)
        else:
            _store_16bit(g.o.iterator.toint() + element * 2, values, quad, exists, kernel)


def _store_float32(address, values, quad, exists, columns: int):
    """Two neighbouring float32 a lane: four lanes fill a 32-byte sector."""
    for i in range(len(values) // 2):
        if 8 * i < columns:
            words = [v.bitcast(Uint32) for v in values[2 * i : 2 * i + 2]]
            copies.store_words(address + (8 * i * 4) + quad * 8, words, exists)


def _store_16bit(address, values, quad, exists, kernel):
    """Per 32 columns four words a lane, transposed over the quad: lane i then holds columns 8i to 8i + 7 of them."""
    columns = kernel.spec.value_head_dim
    packed = cute.make_rmem_tensor((len(values),), kernel.dtype)
    source = cute.make_rmem_tensor((len(values),), Float32)
    for i, value in enumerate(values):
        source[i] = value
    softmax.convert_pairs(source, packed)
    words = cute.recast_tensor(packed, Uint32)
    for block in range(len(values) // 8):
        if 32 * block < columns:
            mine = copies.transpose_quad([words[4 * block + j] for j in range(4)], quad)
            start = 32 * block + quad * 8
            inside = exists & (start < columns) if columns % 32 else exists
            copies.store_words(address + start * 2, mine, inside)
