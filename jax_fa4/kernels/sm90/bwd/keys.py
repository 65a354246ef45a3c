"""dK and dV where the query heads that share a KV head are in several tiles.

These add to float32 sums in global memory. One small kernel zeroes the sums before the main kernel, another rounds them
after it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from jax_fa4.kernels.common import abi, key_tiles, softmax

THREADS = 256
VECTOR = 8

PAIR_BYTES = 16 << 20
"""Of the rows of two query heads in one tile; where they have more, they stay apart."""


def scratch(spec) -> tuple[abi.Buffer, ...]:
    """The sums."""
    return tuple(
        abi.scratch(name, "float32", ("B", "T", "K", columns))
        for name, columns in (("dk_sum", spec.head_dim), ("dv_sum", spec.value_head_dim))
    )


def tile_heads(plan, dims) -> Int32 | int:
    """How many query heads a tile has: two where the L2 cache holds them well, and tiles are many, for fewer sums."""
    if not plan.pairs_heads:
        return plan.tile_heads
    pairs = dims.B * (dims.H // 2) * ((dims.T + (plan.block_k - 1)) // plan.block_k)
    row_bytes = key_tiles.row_bytes(plan, 2)
    paired = Boolean(dims.S <= PAIR_BYTES // row_bytes) & Boolean(pairs >= 4 * dims.sm_count)
    return Int32(cutlass.select_(paired, 2, 1))


def heads_of(kernel, tile) -> Int32 | int:
    """How many query heads a tile has."""
    return kernel.plan.tile_heads if tile.tile_heads is None else tile.tile_heads


def kv_head(kernel, tile) -> Int32:
    """The KV head of a tile."""
    plan, group = kernel.plan, kernel.spec.group
    return tile.head if plan.tile_heads == group else tile.head * heads_of(kernel, tile) // group


@cute.kernel
def clear(dk_sum: cute.Tensor, dv_sum: cute.Tensor):
    """Zeroes both sums; grid (blocks, 2)."""
    zeros = cute.make_rmem_tensor((VECTOR,), Float32)
    zeros.fill(0.0)
    _, which, _ = cute.arch.block_idx()
    if which == 0:
        _store(zeros, dk_sum)
    else:
        _store(zeros, dv_sum)


@cute.kernel
def round_off(dk_sum: cute.Tensor, dk: cute.Tensor, dv_sum: cute.Tensor, dv: cute.Tensor):
    """Rounds both sums; grid (blocks, 2)."""
    _, which, _ = cute.arch.block_idx()
    if which == 0:
        _round(dk_sum, dk)
    else:
        _round(dv_sum, dv)


@cute.jit
def _round(source: cute.Tensor, target: cute.Tensor):
    position = _position()
    if position < _size(source):
        values = cute.make_rmem_tensor((VECTOR,), Float32)
        cute.autovec_copy(_vector(source, position), values)
        rounded = cute.make_rmem_tensor((VECTOR,), target.element_type)
        if cutlass.const_expr(target.element_type is Float32):
            rounded.store(values.load())
        else:
            softmax.convert_pairs(values, rounded)
        cute.autovec_copy(rounded, _vector(target, position))


@cute.jit
def _store(values: cute.Tensor, target: cute.Tensor):
    position = _position()
    if position < _size(target):
        cute.autovec_copy(values, _vector(target, position))


def _position() -> Int64:
    """This thread's first element."""
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    return Int64(block) * (THREADS * VECTOR) + thread * VECTOR


def _vector(tensor: cute.Tensor, position: Int64) -> cute.Tensor:
    return cute.make_tensor((tensor.iterator + position).align(16), cute.make_layout((VECTOR,)))


def _size(tensor: cute.Tensor) -> Int64:
    """Elements of [B, T, K, columns]; columns are a multiple of 8."""
    batch, length, heads, columns = tensor.shape
    return Int64(batch) * length * heads * columns


def _blocks(*tensors: cute.Tensor) -> Int32:
    most = _size(tensors[0])
    for tensor in tensors[1:]:
        most = cutlass.max(most, _size(tensor))
    return Int32((most + (THREADS * VECTOR - 1)) // (THREADS * VECTOR))


def launch_clear(g, stream) -> None:
    """Launches `clear`."""
    clear(g.dk_sum, g.dv_sum).launch(
        grid=(_blocks(g.dk_sum, g.dv_sum), 2, 1), block=(THREADS, 1, 1), stream=stream
    )


def launch_round(g, stream) -> None:
    """Launches `round_off`."""
    round_off(g.dk_sum, g.dk, g.dv_sum, g.dv).launch(
        grid=(_blocks(g.dk_sum, g.dv_sum), 2, 1), block=(THREADS, 1, 1), stream=stream
    )
