"""The compute role: two warpgroups turn S and dP into P and dS; a thread owns a key and half of the queries.

A half of the queries is worked on in parts of 32 columns of tensor memory; P of all parts stays in registers until dP
is there. In a narrow pair two threads share a key, and there is one part. At the end of a tile the same threads write
dK and dV out (`epilogue`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from jax_fa4 import masks
from jax_fa4.kernels.common import backward, key_tiles, segments, softmax
from jax_fa4.kernels.common.pipelines import buffer
from jax_fa4.kernels.sm100 import kept
from jax_fa4.kernels.sm100.bwd import context as contexts
from jax_fa4.kernels.sm100.bwd import epilogue, pair
from jax_fa4.kernels.sm100.bwd.barriers import LANES_BARRIER, phase, phase_before, report
from jax_fa4.kernels.sm100.bwd.context import Context
from jax_fa4.kernels.sm100.bwd.memory import load_columns, store_columns
from jax_fa4.kernels.sm100.bwd.plan import BLOCK, BackwardPlan
from jax_fa4.kernels.sm100.context import finish_tmem_stores, tmem_fence
from jax_fa4.kernels.sm100.softmax import exp2_on_fma

PART = kept.BITS
"""Columns of tensor memory in registers at a time."""
PANEL = 64
"""Queries of which P or dS makes one swizzled panel of shared memory."""
VECTOR = 8
"""16-bit elements of a 16-byte store."""
FEW = 8
"""Queries of which delta is in registers at a time where registers are short."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The calling thread.

    Attributes:
      warp: in its block.
      lane: of tensor memory.
      key: within this CTA's keys.
      group: its warpgroup.
      panel, first: its queries are those of this panel, from this one of the panel on.
    """

    warp: Int32
    lane: Int32
    key: Int32
    group: Int32
    panel: Int32
    first: Any

    @classmethod
    def make(cls, plan: BackwardPlan) -> Place:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane, group = cute.arch.thread_idx()[0] % BLOCK, (warp - plan.warps.compute) // 4
        if plan.narrow:
            return cls(warp, lane, lane % plan.keys, group, warp % 4 // 2, group * PART)
        return cls(warp, lane, lane, group, group, 0)

    def query(self, part: int) -> Int32:
        """First query of a part, within the block."""
        return self.panel * PANEL + self.first + part * PART


@dataclasses.dataclass(frozen=True)
class Step:
    """A step: its number, its block of queries, and the tile it meets."""

    number: Int32
    at: key_tiles.Place
    tile: Any
    steps: Any


def _parts(plan: BackwardPlan) -> int:
    return plan.tmem.score_columns // (2 * PART)


@cute.jit
def run(context: Context):
    """All tiles of this block."""
    key_schedule, group = context.schedule, context.spec.group
    place = Place.make(context.plan)
    number, turn = contexts.first_number(context.plan), Int32(0)
    tiles_done, steps_done = Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = context.steps(tile)
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
        number = contexts.receive(context, turn)
        turn += 1


@cute.jit
def _step(context: Context, place: Place, step: Step):
    """P and dS of one block of queries."""
    plan, pipes, tmem, parts = context.plan, context.pipes, context.plan.tmem, _parts(context.plan)
    statistics = buffer(step.number, plan.statistic_stages)
    first = place.group * (parts * PART)
    pipes.statistics.consumer_wait(statistics)
    ahead = _reads_ahead(context.spec)
    lse = _statistic(context.shared.lse, statistics.index, place, 0) if cutlass.const_expr(ahead) else None
    words = _kept(context, place, step)
    pipes.scores_full.wait(0, phase(step.number))
    tmem_fence("after")
    scores = load_columns(context.tmem, tmem.scores + first, parts * PART, place.warp)
    p = cute.make_tensor(scores.iterator, cute.make_layout((PART, parts)))
    if cutlass.const_expr(tmem.p_packed):
        tmem_fence("before")
        report(plan, pipes.scores_read)
        _meet(place)
        tmem_fence("after")
    for part in cutlass.range_constexpr(parts):
        _probabilities(context, place, step, (part, p[None, part], words[part], lse if part == 0 else None))
    _finish_stores(plan)
    report(plan, pipes.p_full)

    delta = _statistic(context.shared.delta, statistics.index, place, 0) if cutlass.const_expr(ahead) else None
    pipes.dp_full.wait(0, phase(step.number))
    tmem_fence("after")
    for part in cutlass.range_constexpr(parts):
        dp = load_columns(context.tmem, tmem.dp + first + part * PART, PART, place.warp)
        if cutlass.const_expr(ahead and part > 0):
            delta = _statistic(context.shared.delta, statistics.index, place, part)
        _score_gradients(context, place, (statistics.index, part, p[None, part], dp, delta))
        ds = cute.make_rmem_tensor((PART,), context.dtype)
        softmax.convert_pairs(dp, ds)
        if cutlass.const_expr(not plan.narrow):
            store_columns(context.tmem, ds, tmem.dp + first + part * (PART // 2), place.lane)
        if cutlass.const_expr(part == 0 and plan.paired):
            pipes.dq_full.wait(0, phase_before(step.number))  # dS of the step before has been read
        _store(_row(context, place, _ds_address(context, place)), place, part, ds)
        if cutlass.const_expr(plan.narrow):
            if place.panel == context.rank:  # for the own dQ as well
                _store(_row(context, place, _panel(context.shared.ds, plan, context.rank)), place, part, ds)
    _finish_stores(plan)
    if cutlass.const_expr(not plan.narrow):
        cute.arch.fence_view_async_shared()
    if cutlass.const_expr(plan.paired):
        _exchange(context, place)
    report(plan, pipes.ds_full)
    _release(pipes.statistics, statistics.index)


def _finish_stores(plan: BackwardPlan) -> None:
    """P or dS of a warp is where the products find it, and what it has read of tensor memory may be overwritten."""
    if plan.narrow:
        tmem_fence("before")
        cute.arch.fence_view_async_shared()
    else:
        finish_tmem_stores()


def _reads_ahead(spec) -> bool:
    """Whether registers suffice to read LSE before S, and delta before dP is there."""
    return masks.is_interval(spec.mask) and not spec.score_mods


def _meet(place: Place) -> None:
    """A warp of either warpgroup waits for the other's that shares its lanes."""
    cute.arch.barrier(barrier_id=LANES_BARRIER + place.warp % 4, number_of_threads=64)


def _release(ring, index: Int32) -> None:
    """A warp's arrival that it has read a ring's buffer."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.sync_object_empty.get_barrier(index))


def _statistic(tensor: cute.Tensor, stage: Int32, place: Place, part: int, first: int = 0, width: int = PART):
    """LSE or delta of the part's queries: the same for all lanes."""
    values = cute.make_rmem_tensor((width,), Float32)
    vector = place.query(part) // 4 + first // 4
    for i in range(width // 4):
        target = cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4))
        cute.autovec_copy(tensor[None, vector + i, stage], target)
    return values


def _fragment(context: Context, place: Place, step: Step, part: int, values=None) -> backward.Fragment:
    """A part's scores, or their places alone."""
    query, key = step.at.block * BLOCK + place.query(part), context.first_key(step.tile) + place.key
    places = (lambda i: (i, 0), query, key, tuple(range(PART)), (0,))
    return backward.Fragment(values, *places, step.tile.batch, step.at.head)


@cute.jit
def _kept(context: Context, place: Place, step: Step):
    """Which of the thread's scores the mask keeps: a word for each part, of a step that needs the element mask."""
    spec, geometry, parts = context.spec, step.steps.geometry, range(_parts(context.plan))
    without = dataclasses.replace(spec, mask=segments.without(spec.mask))
    words = [Uint32(0) for _ in parts]
    if step.at.masked:
        for part in cutlass.range_constexpr(len(parts)):
            fragment = _fragment(context, place, step, part)
            low, high = masks.column_interval(spec.mask, fragment.key, geometry)
            word = kept.interval(None if isinstance(low, int) and low == 0 else low, high, fragment.query)
            if cutlass.const_expr(not masks.is_interval(without.mask)):
                word = word & kept.where(backward.conditions(without, fragment, geometry, context.g))
                kept.end_block(fragment.query)
            words[part] = word
        if cutlass.const_expr(segments.in_mask(spec.mask)):
            same = kept.same_ids(*_ids(context, [_fragment(context, place, step, part) for part in parts]))
            for part in cutlass.range_constexpr(len(parts)):
                words[part] = words[part] & same[part]
    return words


def _ids(context: Context, fragments: list[backward.Fragment]) -> tuple[Int32, list[Int32]]:
    """Segment ids of the thread's key, and of one query of each part: of a part's 32 a lane has one."""

    def of(ids: cute.Tensor, position) -> Int32:
        return ids[fragments[0].batch, cutlass.min(position, ids.shape[1] - 1)]

    lane, g = cute.arch.lane_idx(), context.g
    return of(g.kv_segment_ids, fragments[0].key), [of(g.q_segment_ids, part.query + lane) for part in fragments]


@cute.jit
def _probabilities(context: Context, place: Place, step: Step, work):
    """P of one part in place, also stored in 16 bits; then dy/dx of the score mods multiplied onto it, for dS.

    `work` is (number of the part, its scores, which of them are kept, LSE of its queries or None to read it here).
    """
    part, values, word, lse = work
    spec, plan, geometry = context.spec, context.plan, step.steps.geometry
    slopes = backward.slopes_like(spec, values)
    backward.apply_score_mods(spec, _fragment(context, place, step, part, values), geometry, context.g, slopes)
    if step.at.masked:
        kept.keep(values, word)
    if cutlass.const_expr(lse is None):
        lse = _statistic(context.shared.lse, step.number % plan.statistic_stages, place, part)
    _exponentials(values, lse, context.kernel.scale_log2, plan.exp2_on_fma)
    rounded = cute.make_rmem_tensor((PART,), context.dtype)
    softmax.convert_pairs(values, rounded)
    if cutlass.const_expr(plan.narrow):
        _store(_row(context, place, _panel(context.shared.p, plan, place.panel)), place, part, rounded)
    else:
        column = plan.tmem.scores + place.group * plan.tmem.p_distance + part * (PART // 2)
        store_columns(context.tmem, rounded, column, place.lane)
    if cutlass.const_expr(slopes is not None):
        for i in cutlass.range_constexpr(PART):
            product = values[i] * slopes[i].to(Float32)
            # A user's function may have no finite slope where P is 0.
            values[i] = Float32(cutlass.select_(values[i] == 0.0, Float32(0.0), product))


def _exponentials(values: cute.Tensor, lse: cute.Tensor, scale_log2: float, on_fma: int) -> None:
    """P = exp2(scale_log2 * score - LSE) in place, in pairs, one of `on_fma` pairs (0: none) on FMA units.

    LSE is +inf for rows without keys. (`backward.probabilities` says the same of one value.)
    """
    scale = (Float32(scale_log2),) * 2
    for i in range(0, PART, 2):
        exponents = cute.arch.fma_packed_f32x2((values[i], values[i + 1]), scale, (-lse[i], -lse[i + 1]))
        emulated = on_fma and i // 2 % on_fma == on_fma - 1
        values[i], values[i + 1] = exp2_on_fma(exponents) if emulated else (softmax.exp2(x) for x in exponents)


def _score_gradients(context: Context, place: Place, work) -> None:
    """dS = P * (dP - delta), in place of dP, in pairs.

    `work` is (stage of delta, number of the part, its P and dP, delta of its queries or None to read it here).
    """
    stage, part, p, dp, delta = work
    width = PART if delta is not None else FEW
    for first in range(0, PART, width):
        some = delta if delta is not None else _statistic(context.shared.delta, stage, place, part, first, width)
        for i in range(0, width, 2):
            j = first + i
            difference = cute.arch.sub_packed_f32x2((dp[j], dp[j + 1]), (some[i], some[i + 1]))
            dp[j], dp[j + 1] = cute.arch.mul_packed_f32x2((p[j], p[j + 1]), difference)


def _panel(tensor: cute.Tensor, plan: BackwardPlan, panel) -> Int32:
    """Address of a panel of (this CTA's keys, queries) in shared memory."""
    return tensor.iterator.toint() + panel * (plan.keys * PANEL * 2)


def _ds_address(context: Context, place: Place) -> Int32:
    """Address of the panel for this thread's dS.

    In a pair `ds` has the own queries and both CTAs' keys; dS of the other CTA's queries goes there from `ds_out`.
    """
    plan, shared = context.plan, context.shared
    if plan.narrow:
        return _panel(shared.ds_out, plan, place.panel)
    if plan.paired:
        own = _panel(shared.ds, plan, context.rank)  # the keys of rank 1 follow those of rank 0
        return cutlass.select_(place.panel == context.rank, own, shared.ds_out.iterator.toint())
    return _panel(shared.ds, plan, place.panel)


def _row(context: Context, place: Place, panel) -> Int32:
    """Address of this thread's key in a panel."""
    return panel + place.key * (PANEL * 2)


def _store(row, place: Place, part: int, values: cute.Tensor) -> None:
    """A thread's queries of one part into its row of a panel, 128-byte swizzle written out."""
    for i in range(PART // VECTOR):
        vector = (place.first // VECTOR + part * (PART // VECTOR) + i) ^ (place.key & 7)
        pointer = cute.make_ptr(values.element_type, row + vector * 16, cute.AddressSpace.smem, assumed_align=16)
        source = cute.make_tensor(values.iterator + i * VECTOR, cute.make_layout(VECTOR))
        cute.autovec_copy(source, cute.make_tensor(pointer, cute.make_layout(VECTOR)))


@cute.jit
def _exchange(context: Context, place: Place):
    """Sends dS of a warp's 32 keys, or half of them, to the other CTA if its dQ needs it."""
    plan, shared, rank = context.plan, context.shared, context.rank
    cute.arch.sync_warp()
    if place.panel != rank:
        sends = True
        if cutlass.const_expr(plan.narrow):
            _meet(place)  # a row's queries come from both warpgroups
            sends = place.group == 0
        if sends:
            warp_bytes = 32 * PANEL * 2
            first = place.key // 32 * warp_bytes
            source = _panel(shared.ds_out, plan, place.panel if plan.narrow else 0) + first
            target = _panel(shared.ds, plan, rank) + first
            with cute.arch.elect_one():
                pair.send(source, target, context.pipes.exchange.get_barrier(0), warp_bytes, 1 - rank)
