"""The load role: one warp brings K and V of each key tile, and the blocks of Q, dO, LSE and delta, into shared memory.

LSE and delta travel with Q, which has two buffers: dO, with one where heads are wide, is then free as soon as the
products have read it, and the next one arrives in time.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.common import copies, key_tiles
from jax_fa4.kernels.common.pipelines import free_buffer
from jax_fa4.kernels.sm100.bwd.context import Context
from jax_fa4.kernels.sm100.bwd.plan import BLOCK


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix (rows, columns, heads, B) in global memory and the TMA atom that loads BLOCK rows of it."""

    atom: cute.CopyAtom
    rows: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Sources:
    """What is loaded; `lse` and `delta` are (rows padded to the block, H, B) in plain memory."""

    q: Matrix
    do: Matrix
    k: Matrix
    v: Matrix
    lse: cute.Tensor
    delta: cute.Tensor

    @classmethod
    def make(cls, dtype, plan, g) -> Sources:
        def matrix(tensor, columns):
            layout = copies.rows_layout(dtype, BLOCK, columns)
            return Matrix(*copies.tma_load_atom(copies.permuted(tensor, 1, 3, 2, 0), layout, (BLOCK, columns)))

        return cls(
            matrix(g.q, plan.tile_d), matrix(g.do, plan.tile_e), matrix(g.k, plan.tile_d), matrix(g.v, plan.tile_e),
            copies.permuted(g.lse_log2, 2, 1, 0), copies.permuted(g.delta_rows, 2, 1, 0),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows: a block of a head of an example."""

    block: Int32
    head: Int32
    batch: Int32


def _fetch(matrix: Matrix, shared: cute.Tensor, ring, state, rows: Rows) -> None:
    """Loads a block of rows into a ring's buffer when it is free."""
    columns = cute.size(shared.shape[1])
    source = cute.local_tile(matrix.rows[None, None, rows.head, rows.batch], (BLOCK, columns), (rows.block, 0))
    target, source = copies.tma_partition(matrix.atom, shared, source)
    ring.producer_acquire(state)
    place = target[None, state.index] if cute.rank(target) == 2 else target
    cute.copy(matrix.atom, source, place, tma_bar_ptr=ring.producer_get_barrier(state))


@cute.jit
def _fetch_step(context: Context, sources: Sources, number: Int32, rows: Rows):
    """Q with LSE and delta, and dO, of a step."""
    plan, pipes, shared = context.plan, context.pipes, context.shared
    q = free_buffer(number, plan.q_stages)
    _fetch(sources.q, shared.q, pipes.q, q, rows)
    barrier = pipes.q.producer_get_barrier(q)
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    for source, target in ((sources.lse, shared.lse), (sources.delta, shared.delta)):
        statistic = cute.local_tile(source[None, rows.head, rows.batch], (BLOCK,), (rows.block,))
        with cute.arch.elect_one():
            cute.copy(bulk, statistic, target[None, q.index], mbar_ptr=barrier)
    _fetch(sources.do, shared.do, pipes.do, free_buffer(number, plan.do_stages), rows)


@cute.jit
def run(context: Context, sources: Sources):
    """All tiles of this block. The next tile's loads start while the other roles finish this one."""
    key_schedule, group = context.schedule, context.spec.group
    number, turn, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = key_tiles.steps(context.kernel, context.g, context.dims, tile)
        count = steps.count(group)
        place = key_tiles.nowhere()
        if count > 0:
            place = key_tiles.first(steps, tile.head * group)
        for step in cutlass.range(count, unroll=1):
            if step == 0:
                keys = Rows(tile.block, tile.head, tile.batch)
                _fetch(sources.k, context.shared.k, context.pipes.k, free_buffer(tiles_done, 1), keys)
                _fetch(sources.v, context.shared.v, context.pipes.v, free_buffer(tiles_done, 1), keys)
            _fetch_step(context, sources, steps_done + step, Rows(place.block, place.head, tile.batch))
            place = key_tiles.following(steps, place)
        if count > 0:
            tiles_done += 1
        steps_done += count
        # Drawn as late as the loads allow, so that a block in a long tile does not hold back a number.
        number = key_tiles.draw(context.pipes, context.shared, context.g.tile_counter, turn)
        turn += 1
