"""The end of a tile or of a piece of one: normalise O and write it and LSE, as the result or to scratch."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warp

from jax_fa4.kernels.common import copies, softmax
from jax_fa4.kernels.sm90.accumulators import packed_rows, rows_view


@dataclasses.dataclass(frozen=True)
class Store:
    """How O leaves through shared memory: registers to there in the order of a warpgroup's accumulator, then TMA."""

    copy: Any
    atom: cute.CopyAtom | None
    o: cute.Tensor | None

    @classmethod
    def make(cls, kernel, products, transfers, thread: Int32) -> Store:
        """For a thread of a warpgroup."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), kernel.dtype)
        copy = cute.make_tiled_copy_C(atom, products.group_output).get_slice(thread)
        return cls(copy, transfers.o_atom, transfers.o)


NO_SINK = -1e30
"""A sink that weighs nothing beside any score: `combine` adds the real one to a tile that was cut."""


def run(block) -> None:
    """Writes this thread's rows of O [B, S, H, E] and of LSE [B, H, S], or of the piece's slot."""
    end(block, begin(block))


def begin(block) -> list[Float32]:
    """The first half of `run`, and what the second half wants.

    O of 16 bits passes through shared memory where it has room there: each warp leaves its 16 rows to TMA, which minds
    the bounds, and goes on. Otherwise rows leave straight from registers; the next tile's first scores can be issued
    between the two halves.
    """
    scales = _write_lse(block)
    _store(block, scales, 0)
    return scales


def end(block, scales: list[Float32]) -> None:
    """The second half."""
    _store(block, scales, 1)


def _store(block, scales: list[Float32], half: int) -> None:
    """A half of O."""
    if block.slot is None:
        _store_result(block, scales, half)
    else:
        _store_either(block, tuple(scales), half)


@cute.jit
def _store_either(block, scales: tuple, half: cutlass.Constexpr):
    if block.slot < 0:
        _store_result(block, scales, half)
    else:
        _store_partial(block, scales, half)


def _store_result(block, scales, half: int) -> None:
    if not block.work.kernel.buffers_output:
        _store_row(block, scales, half)
    elif half == 0:
        _store_by_tma(block, scales)


def _store_partial(block, scales, half: int) -> None:
    """One of the thread's two rows to the piece's slot."""
    work, columns = block.work, block.work.kernel.spec.value_head_dim
    place = copies.address(work.g.partial_o, block.slot, work.lane.row + 8 * half, 0)
    exists = block.rows[half] < work.dims.S
    _store_float32(place.toint(), _normalised(block, scales, half), work.lane.column // 2, exists, columns)


def _normalised(block, scales, r: int) -> list[Float32]:
    output = rows_view(block.work.operand.o)
    return [Float32(output[r, c] * scales[r]) for c in range(cute.size(output, mode=[1]))]


def _write_lse(block) -> list[Float32]:
    """Writes LSE of this thread's rows; returns the factors that normalise their O."""
    work, tile, geometry = block.work, block.tile, block.geometry
    lane, g, dims = work.lane, work.g, work.dims
    sink = [g.sinks[head] for head in block.heads] if work.kernel.spec.sink else None
    if block.slot is not None and sink is not None:
        sink = [Float32(cutlass.select_(block.slot < 0, value, Float32(NO_SINK))) for value in sink]
    inverses, lses = work.statistics.finish(sink)
    scales = []
    for r, (row, head) in enumerate(zip(block.rows, block.heads, strict=True)):
        live = row < geometry.q_length
        lse_row = (Int64(tile.batch) * dims.H + head) * dims.S + row
        address = g.lse.iterator.toint() + lse_row * 4
        if block.slot is not None:
            partial = copies.address(g.partial_lse, cutlass.max(block.slot, Int32(0)), lane.row + 8 * r)
            address = Int64(cutlass.select_(block.slot < 0, address, partial.toint()))
        lse = cutlass.select_(live, lses[r], sink[r] if sink is not None else Float32(softmax.NEG_INF))
        copies.store_words(address, [Float32(lse).bitcast(Uint32)], (row < dims.S) & (lane.column == 0))
        scales.append(Float32(cutlass.select_(live, inverses[r], Float32(0.0))))
    return scales


def wait_until_read() -> None:
    """Until TMA has read what this warp left in shared memory, which it may then overwrite or, at the end, give up."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()


def _store_by_tma(block, scales) -> None:
    work, tile, plan = block.work, block.tile, block.work.kernel.plan
    output = rows_view(work.operand.o)
    rounded = cute.make_rmem_tensor(work.operand.o.layout, work.kernel.dtype)
    words = packed_rows(rounded, work.kernel.dtype).words
    for r, scale in enumerate(scales):
        for c in range(0, cute.size(output, mode=[1]), 2):
            words[r, c // 2] = softmax.pack(output[r, c] * scale, output[r, c + 1] * scale, work.kernel.dtype)
    place = work.shared.o[None, None, work.lane.warpgroup]
    wait_until_read()
    cute.copy(work.store.copy, work.store.copy.retile(rounded), work.store.copy.partition_D(place))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    warp_in_group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
    rows = (tile.q_block * plan.warpgroups + work.lane.warpgroup) * 4 + warp_in_group
    if plan.packed_heads > 1:  # (heads, positions), in units of the box
        parts = max(plan.packed_heads // 16, 1)
        rows = (rows % parts, rows // parts)
    o = work.store.o[None, None, tile.head, tile.batch]
    for panel in range(plan.value_tile_dim // 64):
        source = cute.local_tile(place, (16, 64), (warp_in_group, panel))
        target = cute.local_tile(o, plan.store_tile, (rows, panel))
        cute.copy(work.store.atom, *copies.tma_partition(work.store.atom, source, target))
    cute.arch.cp_async_bulk_commit_group()


def _store_row(block, scales, r: int) -> None:
    """One of the thread's two rows, from registers. Four lanes exchange words so that each stores 16 contiguous bytes,
    in float32 a half of a 32-byte sector."""
    work, tile, spec = block.work, block.tile, block.work.kernel.spec
    quad = work.lane.column // 2
    exists = block.rows[r] < work.dims.S
    element = ((Int64(tile.batch) * work.dims.S + block.rows[r]) * work.dims.H + block.heads[r]) * spec.value_head_dim
    values = _normalised(block, scales, r)
    if spec.float32_out:
        _store_float32(work.g.o.iterator.toint() + element * 4, values, quad, exists, spec.value_head_dim)
    else:
        words = [softmax.pack(*values[c : c + 2], work.kernel.dtype) for c in range(0, len(values), 2)]
        _store_16bit(work.g.o.iterator.toint() + element * 2, words, quad, exists, spec.value_head_dim)


def _store_float32(address, values, quad, exists, columns: int):
    """Two neighbouring float32 a lane."""
    for i in range(len(values) // 2):
        if 8 * i < columns:
            words = [v.bitcast(Uint32) for v in values[2 * i : 2 * i + 2]]
            copies.store_words(address + (8 * i * 4) + quad * 8, words, exists)


def _store_16bit(address, words, quad, exists, columns: int):
    """Per 32 columns four words a lane, transposed over the quad: lane i then holds columns 8i to 8i + 7 of them."""
    for block in range(len(words) // 4):
        if 32 * block < columns:
            mine = copies.transpose_quad(words[4 * block : 4 * block + 4], quad)
            start = 32 * block + quad * 8
            inside = exists & (start < columns) if columns % 32 else exists
            copies.store_words(address + start * 2, mine, inside)
