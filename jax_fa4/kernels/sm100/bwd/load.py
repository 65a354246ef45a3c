"""The load role: one warp brings K and V of each key tile, and the blocks of Q, dO, LSE and delta, into shared memory.

In a pair each CTA's warp loads what its own products read, and reports to the leader's barriers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.common import copies, key_tiles
from jax_fa4.kernels.common.pipelines import free_buffer
from jax_fa4.kernels.sm100.bwd import context as contexts
from jax_fa4.kernels.sm100.bwd.context import Context
from jax_fa4.kernels.sm100.bwd.plan import BLOCK, COMPUTED, BackwardPlan
from jax_fa4.kernels.sm100.bwd.products import cta_group


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix (rows, columns, heads, B) in global memory and the TMA atom that loads a tile of it."""

    atom: cute.CopyAtom
    rows: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Sources:
    """What is loaded, by the names of the plan's tiles; None where another tile serves.

    `lse` and `delta` are (rows padded to the block, H, B) in plain memory.
    """

    q: Matrix
    do: Matrix
    k: Matrix
    v: Matrix
    q_columns: Any
    do_columns: Any
    k_columns: Any
    lse: cute.Tensor
    delta: cute.Tensor

    @classmethod
    def make(cls, dtype, plan: BackwardPlan, g) -> Sources:
        operation = cpasync.CopyBulkTensorTileG2SOp(cta_group(plan))

        def matrix(name, tile):
            tensor = copies.permuted(getattr(g, name.removesuffix("_columns")), 1, 3, 2, 0)
            layout = copies.rows_layout(dtype, tile.rows, tile.columns, None, tile.panel)
            info = cpasync.make_tiled_tma_atom(operation, tensor, layout, (tile.rows, tile.columns))
            return Matrix(info[0], info[1])

        matrices = {name: matrix(name, tile) for name, tile in plan.tiles.items() if name not in COMPUTED}
        return cls(
            **dict.fromkeys(("q_columns", "do_columns", "k_columns")) | matrices,
            lse=copies.permuted(g.lse_log2, 2, 1, 0), delta=copies.permuted(g.delta_rows, 2, 1, 0),
        )  # fmt: skip

    @property
    def matrices(self) -> list[Matrix]:
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [matrix for matrix in fields if isinstance(matrix, Matrix)]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows: a block of a head of an example."""

    block: Int32
    head: Int32
    batch: Int32


def _fetch(context: Context, sources: Sources, name: str, number: Int32, rows: Rows, at_end=False) -> None:
    """Loads the `number`th of a tile, part by part as buffers are free: of a pair's, this CTA's rows or columns.

    `at_end`: see `barriers.Feed`.
    """
    plan, feed = context.plan, getattr(context.pipes, name)
    matrix, shared, tile = getattr(sources, name), getattr(context.shared, name), plan.tiles[name]
    for part in range(feed.parts):
        if name.endswith("_columns"):
            place = (rows.block * feed.parts + part, context.rank)
        else:
            place = (rows.block * plan.ctas + context.rank, part)
        source = cute.local_tile(matrix.rows[None, None, rows.head, rows.batch], (tile.rows, tile.columns), place)
        target, source = copies.tma_partition(matrix.atom, shared, source)
        state = feed.empty(number, part, at_end)
        feed.ring.producer_acquire(state)
        cute.copy(matrix.atom, source, target[None, state.index], tma_bar_ptr=feed.ring.producer_get_barrier(state))


def _fetch_statistics(context: Context, sources: Sources, number: Int32, rows: Rows) -> None:
    """LSE and delta of a step."""
    ring, shared = context.pipes.statistics, context.shared
    state = free_buffer(number, context.plan.statistic_stages)
    ring.producer_acquire(state)
    barrier = ring.producer_get_barrier(state)
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    for source, target in ((sources.lse, shared.lse), (sources.delta, shared.delta)):
        statistic = cute.local_tile(source[None, rows.head, rows.batch], (BLOCK,), (rows.block,))
        place = cute.make_tensor(target[None, None, state.index].iterator, cute.make_layout(BLOCK))
        with cute.arch.elect_one():
            cute.copy(bulk, statistic, place, mbar_ptr=barrier)


@cute.jit
def run(context: Context, sources: Sources):
    """All tiles of this block. The next tile's loads start while the other roles finish this one."""
    key_schedule, group = context.schedule, context.spec.group
    number, turn = contexts.first_number(context.plan), Int32(0)
    tiles_done, steps_done = Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = context.steps(tile)
        count = steps.count(group)
        _tile(context, sources, (tile, steps, count), tiles_done, steps_done)
        if count > 0:
            tiles_done += 1
        steps_done += count
        # Drawn as late as the loads allow, so that a block in a long tile does not hold back a number.
        number = contexts.draw(context, turn)
        turn += 1


@cute.jit
def _tile(context: Context, sources: Sources, work, tiles_done: Int32, steps_done: Int32):
    """What a tile and its steps need, in the order in which the products read it: see `mma`."""
    plan, group = context.plan, context.spec.group
    tile, steps, count = work
    place = key_tiles.nowhere()
    if count > 0:
        place = key_tiles.first(steps, tile.head * group)
    last_block, last_head = place.block, place.head
    for i in cutlass.range(count, unroll=1):
        step, rows = steps_done + i, Rows(place.block, place.head, tile.batch)
        before, keys = Rows(last_block, last_head, tile.batch), Rows(tile.block, tile.head, tile.batch)
        if i == 0:
            _fetch(context, sources, "k", tiles_done, keys)
        _fetch(context, sources, "q", step, rows, at_end=i == 0)
        _fetch_statistics(context, sources, step, rows)
        if i == 0:
            _fetch(context, sources, "v", tiles_done, keys)
        if cutlass.const_expr(plan.paired and not plan.narrow):
            if i > 0:
                _fetch(context, sources, "q_columns", step - 1, before)
        _fetch(context, sources, "do", step, rows)
        if cutlass.const_expr(plan.paired):
            if i == 0:
                _fetch(context, sources, "k_columns", tiles_done, keys)
            if cutlass.const_expr(plan.narrow):
                if i > 0:
                    _fetch(context, sources, "q_columns", step - 1, before)
            _fetch(context, sources, "do_columns", step, rows)
        last_block, last_head = place.block, place.head
        place = key_tiles.following(steps, place)
    if cutlass.const_expr(plan.paired):
        if count > 0:
            rows = Rows(last_block, last_head, tile.batch)
            _fetch(context, sources, "q_columns", steps_done + count - 1, rows, at_end=True)
