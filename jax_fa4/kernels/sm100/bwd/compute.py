"""The compute role: two warpgroups turn S and dP into P and dS; a thread owns a key and half of the queries.

A half of the queries is worked on in parts of 32 columns of tensor memory; P of both parts stays in registers until dP
is there. At the end of a tile the same threads write dK and dV out (`epilogue`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4 import masks
from jax_fa4.kernels.common import backward, key_tiles, softmax
from jax_fa4.kernels.common.pipelines import buffer
from jax_fa4.kernels.sm100.bwd import epilogue
from jax_fa4.kernels.sm100.bwd.context import (
    COMPUTE_BARRIER,
    HALF,
    Context,
    arrive_ring,
    load_columns,
    phase,
    store_columns,
)
from jax_fa4.kernels.sm100.bwd.plan import BLOCK
from jax_fa4.kernels.sm100.context import arrive_warp, finish_tmem_stores, tmem_fence

PART = 32
"""Columns of tensor memory in registers at a time."""
PARTS = HALF // PART
VECTOR = 8
"""16-bit elements of a 16-byte store."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The calling thread: its key within the tile (also its lane of tensor memory), and its half of the queries."""

    row: Int32
    half: Int32


@dataclasses.dataclass(frozen=True)
class Step:
    """A step: its number, its block of queries, and the tile it meets."""

    number: Int32
    at: key_tiles.Place
    tile: Any
    steps: Any


@cute.jit
def run(context: Context):
    """All tiles of this block."""
    key_schedule, group = context.schedule, context.spec.group
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    place = Place(cute.arch.thread_idx()[0] % BLOCK, (warp - context.plan.warps.compute) // 4)
    number, turn, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = key_tiles.steps(context.kernel, context.g, context.dims, tile)
        count = steps.count(group)
        at = key_tiles.nowhere()
        if count > 0:
            at = key_tiles.first(steps, tile.head * group)
        for i in cutlass.range(count, unroll=1):
            _step(context, place, Step(steps_done + i, at, tile, steps))
            at = key_tiles.following(steps, at)
        epilogue.run(context, place, tile, count, tiles_done)
        if count > 0:
            tiles_done += 1
        steps_done += count
        number = key_tiles.receive(context.pipes, context.shared, turn)
        turn += 1


@cute.jit
def _step(context: Context, place: Place, step: Step):
    """P and dS of one block of queries."""
    plan, pipes, tmem = context.plan, context.pipes, context.plan.tmem
    q = buffer(step.number, plan.q_stages)
    first = place.half * HALF
    p = cute.make_rmem_tensor((PART, PARTS), Float32)
    pipes.q.consumer_wait(q)
    ahead = _reads_ahead(context.spec, tmem)
    lse = _statistic(context.shared.lse, q.index, place, 0) if cutlass.const_expr(ahead) else None
    pipes.scores_full.wait(0, phase(step.number))
    tmem_fence("after")
    loaded = [load_columns(context, tmem.scores + first + part * PART, PART, place.row) for part in range(PARTS)]
    cute.arch.fence_view_async_tmem_load()
    for part in cutlass.range_constexpr(PARTS):
        p[None, part].store(cute.make_tensor(loaded[part].iterator, cute.make_layout(PART)).load())
    if cutlass.const_expr(tmem.serial):
        tmem_fence("before")
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=2 * BLOCK)
        tmem_fence("after")
    for part in cutlass.range_constexpr(PARTS):
        _probabilities(context, place, step, (part, p[None, part], lse if part == 0 else None))
    finish_tmem_stores()
    arrive_warp(pipes.p_full, 0)

    delta = _statistic(context.shared.delta, q.index, place, 0)
    pipes.dp_full.wait(0, phase(step.number))
    tmem_fence("after")
    for part in cutlass.range_constexpr(PARTS):
        dp = load_columns(context, tmem.dp + first + part * PART, PART, place.row)
        if cutlass.const_expr(part > 0):
            delta = _statistic(context.shared.delta, q.index, place, part)
        cute.arch.fence_view_async_tmem_load()
        _score_gradients(p[None, part], dp, delta)
        ds = cute.make_rmem_tensor((PART,), context.dtype)
        softmax.convert_pairs(dp, ds)
        store_columns(context, ds, tmem.dp + first + part * (PART // 2), place.row)
        _store_ds(context, place, part, ds)
    finish_tmem_stores()
    cute.arch.fence_view_async_shared()
    arrive_warp(pipes.ds_full, 0)
    arrive_ring(pipes.q, q.index)


def _reads_ahead(spec, tmem) -> bool:
    """Whether registers suffice to read the first part's LSE before S is there."""
    return masks.is_interval(spec.mask) and not spec.score_mods and not tmem.serial


def _statistic(tensor: cute.Tensor, stage: Int32, place: Place, part: int) -> cute.Tensor:
    """LSE or delta of the part's queries: the same for all lanes."""
    values = cute.make_rmem_tensor((PART,), Float32)
    layout = cute.make_layout((4, PART // 4, PARTS, 2, cute.size(tensor, mode=[1])))
    vectors = cute.make_tensor(tensor.iterator, layout)
    for i in range(PART // 4):
        target = cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4))
        cute.autovec_copy(vectors[None, i, part, place.half, stage], target)
    return values


@cute.jit
def _probabilities(context: Context, place: Place, step: Step, work):
    """P of one part in place, also stored in 16 bits; then dy/dx of the score mods multiplied onto it, for dS.

    `work` is (number of the part, its scores, LSE of its queries or None to read it here).
    """
    part, values, lse = work
    spec, plan, geometry = context.spec, context.plan, step.steps.geometry
    first = place.half * HALF
    query, key = step.at.block * BLOCK + first + part * PART, step.tile.block * BLOCK + place.row
    fragment = backward.Fragment(
        values, lambda i: (i, 0), query, key, tuple(range(PART)), (0,), step.tile.batch, step.at.head
    )
    slopes = backward.slopes_like(spec, values)
    backward.apply_score_mods(spec, fragment, geometry, context.g, slopes)
    if step.at.masked:
        backward.apply_mask(spec, fragment, geometry, context.g)
    if cutlass.const_expr(lse is None):
        lse = _statistic(context.shared.lse, step.number % plan.q_stages, place, part)
    _exponentials(values, lse, context.kernel.scale_log2)
    rounded = cute.make_rmem_tensor((PART,), context.dtype)
    softmax.convert_pairs(values, rounded)
    column = plan.tmem.scores + place.half * plan.tmem.p_distance + part * (PART // 2)
    store_columns(context, rounded, column, place.row)
    if cutlass.const_expr(slopes is not None):
        for i in cutlass.range_constexpr(PART):
            product = values[i] * slopes[i].to(Float32)
            # A user's function may have no finite slope where P is 0.
            values[i] = Float32(cutlass.select_(values[i] == 0.0, Float32(0.0), product))


def _exponentials(values: cute.Tensor, lse: cute.Tensor, scale_log2: float) -> None:
    """P = exp2(scale_log2 * score - LSE) in place (`backward.probabilities` in pairs); LSE is +inf without keys."""
    scale = (Float32(scale_log2),) * 2
    for i in range(0, PART, 2):
        exponents = cute.arch.fma_packed_f32x2((values[i], values[i + 1]), scale, (-lse[i], -lse[i + 1]))
        values[i], values[i + 1] = (softmax.exp2(x) for x in exponents)


def _score_gradients(p: cute.Tensor, dp: cute.Tensor, delta: cute.Tensor) -> None:
    """dS = P * (dP - delta), in place of dP, in pairs."""
    for i in range(0, PART, 2):
        difference = cute.arch.sub_packed_f32x2((dp[i], dp[i + 1]), (delta[i], delta[i + 1]))
        dp[i], dp[i + 1] = cute.arch.mul_packed_f32x2((p[i], p[i + 1]), difference)


def _store_ds(context: Context, place: Place, part: int, ds: cute.Tensor) -> None:
    """A thread's queries of one part into its row of shared dS: panels of 64 queries, 128-byte swizzle written out."""
    rows = context.shared.ds.iterator.toint() + place.half * (BLOCK * HALF * 2) + place.row * (HALF * 2)
    for i in range(PART // VECTOR):
        vector = (part * (PART // VECTOR) + i) ^ (place.row & 7)
        pointer = cute.make_ptr(context.dtype, rows + vector * 16, cute.AddressSpace.smem, assumed_align=16)
        source = cute.make_tensor(ds.iterator + i * VECTOR, cute.make_layout(VECTOR))
        cute.autovec_copy(source, cute.make_tensor(pointer, cute.make_layout(VECTOR)))
