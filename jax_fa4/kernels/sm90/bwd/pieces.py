"""dK and dV of tiles that are cut into pieces (see `last_wave`).

Each piece writes its part of both, in float32, to a slab of its own; a kernel after the main one adds them up, always
in the same order. Where query heads that share a KV head add to sums of their own (see `keys`), pieces do the same.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4.kernels.common import abi, last_wave, softmax

THREADS = 256
VECTOR = 4


def scratch(spec, plan) -> tuple[abi.Buffer, ...]:
    """The slabs: [slab, key, 1, column], as outputs are [B, T, K, column]."""
    return tuple(
        abi.scratch(name, "float32", (last_wave.SLABS, plan.block_k, 1, columns))
        for name, columns in (("dk_slabs", spec.head_dim), ("dv_slabs", spec.value_head_dim))
    )


@cute.kernel
def add_up(dk_slabs: cute.Tensor, dk: cute.Tensor, dv_slabs: cute.Tensor, dv: cute.Tensor, key_schedule):
    """Writes dK and dV of the cut tiles; grid (blocks, tiles, 2), `VECTOR` elements a thread."""
    _, _, which = cute.arch.block_idx()
    if which == 0:
        _add_up(dk_slabs, dk, key_schedule)
    else:
        _add_up(dv_slabs, dv, key_schedule)


@cute.jit
def _add_up(slabs: cute.Tensor, target: cute.Tensor, key_schedule):
    block, index, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    _, keys, _, columns = slabs.shape
    place = (block * THREADS + thread) * VECTOR
    key, column = place // columns, place % columns
    tile = key_schedule.tile(key_schedule.whole + index * key_schedule.pieces)
    row = tile.block * keys + key
    if key < keys and row < target.shape[1]:
        total = _read(slabs, tile.slab, key, column)
        for piece in cutlass.range(1, key_schedule.pieces, unroll=8):
            part = _read(slabs, tile.slab + piece, key, column)
            for i in cutlass.range_constexpr(VECTOR):
                total[i] = total[i] + part[i]
        rounded = cute.make_rmem_tensor((VECTOR,), target.element_type)
        if cutlass.const_expr(target.element_type is Float32):
            rounded.store(total.load())
        else:
            softmax.convert_pairs(total, rounded)
        cute.autovec_copy(rounded, _vector(target[tile.batch, row, tile.head, None], column))


def _read(slabs: cute.Tensor, slab: Int32, key: Int32, column: Int32) -> cute.Tensor:
    values = cute.make_rmem_tensor((VECTOR,), Float32)
    cute.autovec_copy(_vector(slabs[slab, key, 0, None], column), values)
    return values


def _vector(row: cute.Tensor, column: Int32) -> cute.Tensor:
    size_bytes = VECTOR * row.element_type.width // 8
    return cute.make_tensor((row.iterator + column).align(size_bytes), cute.make_layout((VECTOR,)))


@cute.jit
def launch(dk_slabs: cute.Tensor, dk: cute.Tensor, dv_slabs: cute.Tensor, dv: cute.Tensor, key_schedule, stream):
    """Launches `add_up`, if any tile is cut."""
    if key_schedule.pieces > 1:
        blocks = max(-(-slabs.shape[1] * slabs.shape[3] // (THREADS * VECTOR)) for slabs in (dk_slabs, dv_slabs))
        add_up(dk_slabs, dk, dv_slabs, dv, key_schedule).launch(
            grid=(blocks, key_schedule.cut_tiles, 2), block=(THREADS, 1, 1), stream=stream
        )
