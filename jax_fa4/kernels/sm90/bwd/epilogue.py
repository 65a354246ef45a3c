"""What leaves a consumer warpgroup: dQ of a step, and dK and dV of a finished tile."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from jax_fa4.kernels.common import copies, softmax
from jax_fa4.kernels.common.key_tiles import KeyTile
from jax_fa4.kernels.sm90.bwd import keys
from jax_fa4.kernels.sm90.bwd.fragments import thread_in_warpgroup
from jax_fa4.kernels.sm90.bwd.pipes import WARPGROUP_AND_WARP, Barrier


@cute.jit
def stage_dq(consumer, dq: cute.Tensor):
    """Writes this warpgroup's part of (a slice of) dQ to shared memory, in register order (`finish` undoes it)."""
    group = consumer.warpgroup
    cute.arch.barrier(barrier_id=Barrier.DQ_EMPTY + group, number_of_threads=WARPGROUP_AND_WARP)
    # Other forms would have to spill the place: there it is worked out each time, at a cost where it need not be.
    thread = consumer.thread % 128 if consumer.plan.dq_transposed else thread_in_warpgroup()
    target = consumer.shared.dq[None, thread, None, group]
    cute.autovec_copy(cute.make_tensor(dq.iterator, cute.make_layout(target.shape)), target)


def hand_over_dq(consumer) -> None:
    """Lets the store warp have what `stage_dq` wrote; a fence towards the asynchronous proxy comes before."""
    cute.arch.barrier_arrive(
        barrier_id=Barrier.DQ_FULL + consumer.warpgroup, number_of_threads=WARPGROUP_AND_WARP
    )


@cute.jit
def run(consumer, tile):
    """Writes dV and dK of this thread's keys, or adds them to the sums of the KV head's query heads.

    Rows leave straight from registers, so the next tile's loads never wait for this tile's stores.
    """
    g = consumer.g
    if cutlass.const_expr(consumer.plan.tile_heads < consumer.spec.group):
        _write_both(consumer, g.dk_sum, g.dv_sum, tile)
    elif cutlass.const_expr(not consumer.plan.piece_costs):
        _write_both(consumer, g.dk, g.dv, tile)
    elif tile.slab < 0:
        _write_both(consumer, g.dk, g.dv, tile)
    else:
        _write_both(consumer, g.dk_slabs, g.dv_slabs, KeyTile(Int32(0), Int32(0), tile.slab, None))


def _write_both(consumer, dk: cute.Tensor, dv: cute.Tensor, tile) -> None:
    """dK gets the scale of the scores."""
    outputs = {"dv": Target.make(consumer, dv, tile, 1.0), "dk": Target.make(consumer, dk, tile, consumer.spec.scale)}
    if not consumer.plan.wide:
        write(consumer, consumer.operands.dv, outputs["dv"], tile)
        write(consumer, consumer.operands.dk, outputs["dk"], tile)
        return
    writes = write_transposed if consumer.plan.dkv_transposed else write
    for part in consumer.sums:
        writes(consumer, part.accumulator, part.target(outputs), tile)


@dataclasses.dataclass(frozen=True)
class Target:
    """Where an accumulator goes.

    Attributes:
      head: byte address of the first key's row of the KV head, in an output [B, T, K, columns].
      keys: how many rows it has.
      row_bytes: from one to the next.
      columns: of a row.
      scale: what the accumulator is multiplied with.
      dtype: element type of the output.
      column, key: where the accumulator begins, the key within the tile.
    """

    head: Int64
    keys: Int32
    row_bytes: Int32
    columns: int | Int32
    scale: float | Float32
    dtype: type
    column: int | Int32 = 0
    key: int | Int32 = 0

    @classmethod
    def make(cls, consumer, output: cute.Tensor, tile, scale: float) -> Target:
        head = copies.address(output, tile.batch, 0, keys.kv_head(consumer.kernel, tile), 0).toint()
        columns, dtype = output.shape[3], output.element_type
        return cls(head, output.shape[1], output.shape[2] * (columns * dtype.width // 8), columns, scale, dtype)


def write(consumer, accumulator: cute.Tensor, target: Target, tile) -> None:
    """Writes a thread's accumulator ((2, 2, n / 8), 1, 1), of two keys."""
    groups, plan = cute.size(accumulator) // 4, consumer.plan
    adds, size = plan.tile_heads < consumer.spec.group, target.dtype.width // 8
    for row in range(2):
        key = tile.block * plan.block_k + consumer.key + 8 * row
        exists = Boolean(key < target.keys)
        address = target.head + Int64(key) * target.row_bytes + target.column * size
        values = [accumulator[4 * i + 2 * row + pair] * target.scale for i in range(groups) for pair in range(2)]
        store = _add_float32 if adds else store_row
        store(address, values, consumer.quad_lane, exists, target.columns - target.column, target.dtype)


def write_transposed(consumer, accumulator: cute.Tensor, target: Target, tile) -> None:
    """Writes an accumulator ((2, 2, groups), tiles, 1) whose rows are columns of the output, and whose columns keys."""
    plan, lane = consumer.plan, cute.arch.lane_idx()
    adds, wide = plan.tile_heads < consumer.spec.group, target.dtype.width == 32
    (_, _, groups), tiles, _ = accumulator.shape
    first = tile.block * plan.block_k + target.key
    for group in range(groups):
        key = first + 8 * group + (2 * consumer.quad_lane if wide else lane // 4)
        for i in range(tiles):
            registers = [4 * (group + groups * i) + j for j in range(4)]  # two keys of a column, of the eighth after it
            values = [accumulator[register] * target.scale for register in registers]
            column = target.column + 64 * i
            if wide:
                for j, value in enumerate(values):
                    _write_float32(target, key + j % 2, consumer.row + column + 8 * (j // 2), value, adds)
            else:
                _write_16bit(target, key, column + consumer.thread // 32 * 16, values, lane)


def _write_float32(target: Target, key: Int32, column: Int32, value, adds: bool) -> None:
    """Writes or adds one element: eight lanes fill a 32-byte sector."""
    inside = Boolean(key < target.keys) & Boolean(column < target.columns)
    address = target.head + Int64(key) * target.row_bytes + column * 4
    if adds:
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};", read_only_args=[address, value], predicate=inside
        )
    else:
        copies.store_words(address, [value.bitcast(Uint32)], inside)


def _write_16bit(target: Target, key: Int32, first: Int32, values, lane: Int32) -> None:
    """Rounds a lane's two keys of a column and of the eighth after it, and writes four columns of one key instead.

    Four lanes fill a 32-byte sector with 16 columns from the `first` on.
    """
    source = cute.make_rmem_tensor((4,), Float32)
    for i, value in enumerate(values):
        source[i] = value
    rounded = cute.make_rmem_tensor((4,), target.dtype)
    softmax.convert_pairs(source, rounded)
    words = cute.recast_tensor(rounded, Uint32)
    low, high = (copies.transpose_matrix(words[i], lane) for i in range(2))  # two of columns 0 to 7, two of 8 to 15
    odd = lane % 2 != 0
    received = cute.arch.shuffle_sync_bfly(Uint32(cutlass.select_(odd, low, high)), offset=1)
    pair = [Uint32(cutlass.select_(odd, received, low)), Uint32(cutlass.select_(odd, high, received))]
    column = first + lane % 2 * 8 + lane % 4 // 2 * 4
    inside = Boolean(key < target.keys) & Boolean(column < target.columns)
    copies.store_words(target.head + Int64(key) * target.row_bytes + column * 2, pair, inside)


def _add_float32(address, values, quad: Int32, exists: Boolean, columns, dtype) -> None:
    """As `_store_float32`, but adds to what is there."""
    for i in range(len(values) // 2):
        if isinstance(columns, int) and 8 * i >= columns:
            break
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v2.f32 [{$r0}], {{$r1}, {$r2}};",
            read_only_args=[address + 32 * i + quad * 8, *values[2 * i : 2 * i + 2]],
            predicate=exists & (8 * i < columns),
        )


def store_row(address, values, quad: Int32, exists: Boolean, columns, dtype) -> None:
    """Stores a thread's part of a row at a byte address: two neighbouring values of each 8, of the `columns` left."""
    store = _store_float32 if dtype.width == 32 else _store_16bit
    store(address, values, quad, exists, columns, dtype)


def _store_float32(address, values, quad: Int32, exists: Boolean, columns, dtype) -> None:
    """Two neighbouring values a lane: four lanes fill a 32-byte sector."""
    for i in range(len(values) // 2):
        if isinstance(columns, int) and 8 * i >= columns:
            break
        inside = exists & (8 * i < columns)
        words = [value.bitcast(Uint32) for value in values[2 * i : 2 * i + 2]]
        copies.store_words(address + 32 * i + quad * 8, words, inside)


def _store_16bit(address, values, quad: Int32, exists: Boolean, columns, dtype) -> None:
    """Per 32 columns four words a lane, transposed over the quad: lane i then holds columns 8i to 8i + 7 of them."""
    source = cute.make_rmem_tensor((len(values),), Float32)
    for i, value in enumerate(values):
        source[i] = value
    rounded = cute.make_rmem_tensor((len(values),), dtype)
    softmax.convert_pairs(source, rounded)
    words = cute.recast_tensor(rounded, Uint32)
    for block in range(len(values) // 8):
        if isinstance(columns, int) and 32 * block >= columns:
            break
        mine = copies.transpose_quad([words[4 * block + j] for j in range(4)], quad)
        start = 32 * block + quad * 8
        copies.store_words(address + start * 2, mine, exists & (start < columns))
