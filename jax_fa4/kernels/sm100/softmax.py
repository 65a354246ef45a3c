"""The softmax role: two warpgroups turn S into P; a thread owns a row.

Everything about O is left to the correction role: a step mails it the factor by which O shrinks, the end of a tile the
factor that normalises it. LSE is written here.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import tcgen05

from jax_fa4 import masks
from jax_fa4.kernels.common import mask, segments, sequence
from jax_fa4.kernels.common.mask import NUMBERS
from jax_fa4.kernels.common.softmax import LN_2, LOG2_E, NEG_INF, RowFragment, exp2
from jax_fa4.kernels.sm100 import dispatch, kept
from jax_fa4.kernels.sm100.context import (
    SCALE_BARRIER,
    Context,
    arrive_leader,
    arrive_warp,
    finish_tmem_stores,
    query_of,
    read_tmem,
    result_of,
    scores,
    tmem_fence,
)
from jax_fa4.kernels.sm100.groups import lowest
from jax_fa4.kernels.sm100.plans import BLOCK_K, BLOCK_Q, SLOTS

# A row is worked on in parts: loads, exponentials, conversion and stores of one part overlap those of the next.
_PART = kept.BITS
_PARTS = BLOCK_K // _PART
# In log2: beyond it the maximum's product with the scale is not accurate enough to be subtracted in one FMA.
_LARGE = 64.0
# Independent chains of a row's maximum and sum.
_CHAINS = 4
# Parts of P after which the second product may start.
_HEAD_PARTS = 3

# 2**f on [0, 1), exact at 0, relative error 3.0e-6 (degree 3 has 8.8e-5: enough for P in 16 bits, but it shows in LSE).
_EXP2 = (1.0, 0.6930448412895203, 0.241280198097229, 0.052242476493120193, 0.013426682911813259)
_ROUND_TO_INTEGER = float(2**23 + 2**22)


@dataclasses.dataclass(frozen=True)
class _Row:
    """The calling thread's row of the work in hand.

    Fields: query tile, row within it, warp within the warpgroup; the work, query head and row of the sequence, the
    row's element mask, and the number of blocks that this warpgroup had done before.
    """

    tile: Int32
    row: Int32
    warp: Int32
    work: Any
    head: Int32
    q_row: Int32
    mask: mask.ElementMask
    first_turn: Int32


@cute.jit
def run(context: Context):
    plan = context.plan
    row = cute.arch.thread_idx()[0] % BLOCK_Q
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tile = warp // 4 if cutlass.const_expr(plan.q_tiles == 2) else Int32(0)
    if warp < 4 * plan.q_tiles:
        _tiles(context, tile, row, warp % 4)


@cute.jit
def _tiles(context: Context, tile, row, warp):
    plan, barriers, work_list = context.plan, context.barriers, context.work
    s_inverse, g_lse = context.shared.inverse, context.memory.lse
    turn, inverse_phase = Int32(0), Int32(1)
    number, done, read = dispatch.first(context), Int32(0), Int32(0)
    while number < work_list.count:
        work = work_list.at(number)
        head, q_row = query_of(context, work, tile, row)
        element_mask = sequence.element_mask(context.spec, work_list.g, work.batch, (q_row,), work.geometry)
        place = _Row(tile, row, warp, work, head, q_row, element_mask, turn)
        row_max, row_sum = Float32(NEG_INF), Float32(0.0)
        if cutlass.const_expr(plan.key_blocks == "ids"):
            turn, read, statistics = _by_ids(context, place, read, (row_max, row_sum))
        else:
            visits, _ = work_list.visits(work)
            turn, statistics = _in_range(context, place, visits.of(tile), (row_max, row_sum))
        row_max, row_sum = statistics
        inverse, lse = _finish(context, place, row_max, row_sum)
        barriers.inverse_empty.wait(tile, inverse_phase)
        s_inverse[tile, row] = inverse
        arrive_warp(barriers.inverse_full, tile)
        inverse_phase ^= 1
        where, exists = result_of(context, work, tile, row)
        if exists:
            g_lse[where] = lse
        number, done = dispatch.following(context, number, done)


@cute.jit
def _in_range(context: Context, place: _Row, blocks, statistics):
    """All blocks of a range: those at its ends with the element mask, between them without."""
    turn = place.first_turn
    for i in cutlass.range(blocks.end - blocks.full_end, unroll=1):
        statistics = _step(context, place, turn, blocks.end - 1 - i, statistics, True)
        turn += 1
    for i in cutlass.range(blocks.full_end - blocks.full_start, unroll=1):
        statistics = _step(context, place, turn, blocks.full_end - 1 - i, statistics, False)
        turn += 1
    if cutlass.const_expr(context.work.masks_left):
        for i in cutlass.range(blocks.full_start - blocks.start, unroll=1):
            statistics = _step(context, place, turn, blocks.full_start - 1 - i, statistics, True)
            turn += 1
    return turn, statistics


@cute.jit
def _by_ids(context: Context, place: _Row, read, statistics):
    """The blocks that ids leave, group by group: without the element mask where ids and the other masks keep all."""
    turn, seen, count = place.first_turn, Int32(0), Int32(1)
    while seen < count:
        group = context.groups.receive(read)
        read += 1
        count = group.count
        seen += cute.arch.popc(group.visited[0] | group.visited[1])
        visited, full = (NUMBERS.where(place.tile == 0, *words) for words in (group.visited, group.full))
        while visited != 0:
            after, bit = lowest(visited)
            if (full & bit) != 0:
                statistics = _step(context, place, turn, group.top - 1 - after, statistics, False)
            else:
                statistics = _step(context, place, turn, group.top - 1 - after, statistics, True)
            turn += 1
            visited = visited & ~bit
    return turn, read, statistics


def _finish(context: Context, place: _Row, row_max, total) -> tuple[Float32, Float32]:
    """(factor that normalises O, LSE) of a row; the sink joins the denominator.

    A row without keys, or past the end, gives (0, -inf); with a sink (0, sink).
    """
    spec = context.spec
    empty = (row_max == NEG_INF) | (place.q_row >= place.work.geometry.q_length)
    total = Float32(cutlass.select_(empty, Float32(0.0), total))
    scale = 1.0 if spec.score_mods else spec.scale
    top = Float32(cutlass.select_(empty, Float32(NEG_INF), row_max * scale))
    weight = Float32(1.0)
    if spec.sink and not context.plan.split_kv:
        sink = context.work.g.sinks[place.head]
        largest = cute.arch.fmax(top, sink)
        largest = Float32(cutlass.select_(largest == NEG_INF, Float32(0.0), largest))
        weight = exp2((top - largest) * LOG2_E)
        total = total * weight + exp2((sink - largest) * LOG2_E)
        top = largest
    nothing = total == 0.0
    safe = Float32(cutlass.select_(nothing, Float32(1.0), total))
    inverse = cutlass.select_(nothing, Float32(0.0), weight * cute.arch.rcp_approx(safe))
    lse = cutlass.select_(nothing, Float32(NEG_INF), top + cute.math.log2(safe, fastmath=True) * LN_2)
    return Float32(inverse), Float32(lse)


@cute.jit
def _step(context: Context, place: _Row, turn, block, statistics, masked: cutlass.Constexpr):
    """P of one block, and the row's new (maximum, sum)."""
    plan, barriers = context.plan, context.barriers
    old_max, row_sum = statistics
    slot, phase = place.tile, turn % 2
    if cutlass.const_expr(plan.q_tiles == 1):
        slot, phase = turn % SLOTS, (turn // SLOTS) % 2
    load, store, t_scores, t_probabilities = _views(context, slot, place.row)

    words = _kept_keys(context, place, block) if cutlass.const_expr(masked) else []
    barriers.score_full.wait(slot, phase)
    tmem_fence("after")
    r_scores = cute.make_rmem_tensor(load.partition_D(_coordinates(BLOCK_K)).shape, Float32)
    read_tmem(t_scores, r_scores)
    values = cute.make_tensor(r_scores.iterator, cute.make_layout((1, BLOCK_K)))
    scale_log2 = _modify(context, place, block, values)
    _keep(values, words)

    block_max = _maximum(values)
    exact = turn - place.first_turn < plan.exact_blocks
    threshold = Float32(cutlass.select_(exact, Float32(0.0), Float32(plan.rescale_threshold_log2)))
    grown = (block_max - old_max) * scale_log2 > threshold
    new_max = Float32(cutlass.select_(grown, block_max, old_max))
    # A row without any key so far: its P is to be 0, not NaN.
    base = Float32(cutlass.select_(new_max == NEG_INF, Float32(0.0), new_max)) if masked else new_max
    rescale = Float32(cutlass.select_(grown, exp2((old_max - base) * scale_log2), Float32(1.0)))
    s_scale = context.shared.scale
    if turn > place.first_turn:
        s_scale[slot, place.row] = rescale
        cute.arch.barrier_arrive(barrier_id=SCALE_BARRIER + slot * 4 + place.warp, number_of_threads=64)

    # Rounding max * scale_log2 would move the largest P off 1; beyond _LARGE that shows, and it pays to subtract first.
    bias = base * -scale_log2
    exponent = _Exponent(scale_log2, base, bias)
    total = row_sum * rescale
    if cute.arch.vote_any_sync(cute.arch.fmax(bias, -bias) > _LARGE):
        total = _probabilities(context, slot, r_scores, (store, t_probabilities), exponent, total, True, (0, 0, 0, 0))
    else:
        on_fma = (0, 0, 0, 0) if masked else plan.exp2_on_fma
        total = _probabilities(context, slot, r_scores, (store, t_probabilities), exponent, total, False, on_fma)
    return new_max, total


@dataclasses.dataclass(frozen=True)
class _Exponent:
    """P = 2 ** (scale_log2 * x + bias), or 2 ** (scale_log2 * (x - base)): the same but for rounding."""

    scale_log2: float
    base: Float32
    bias: Float32


@cute.jit
def _probabilities(
    context: Context,
    slot,
    r_scores,
    target,
    exponent: _Exponent,
    total,
    subtract_first: cutlass.Constexpr,
    on_fma: cutlass.Constexpr,
):
    """Stores P in 16 bits by (copy, place) `target` and lets mma have it; returns `total` plus the sum of P."""
    barriers = context.barriers
    store, t_probabilities = target
    r_store = cute.make_rmem_tensor(store.partition_S(_coordinates(BLOCK_K // 2)).shape, Float32)
    r_p = cute.make_tensor(cute.recast_ptr(r_store.iterator, dtype=context.dtype), cute.make_layout((_PART, _PARTS)))
    parts = cute.make_tensor(r_scores.iterator, cute.make_layout((_PART, _PARTS)))
    # The sum trails by a part: it fills the issue slots between the next part's exponentials.
    sums = [(total, Float32(0.0))]
    for part in cutlass.range_constexpr(_PARTS):
        _exponentials(parts[None, part], exponent, subtract_first, on_fma[part])
        if cutlass.const_expr(part > 0):
            sums = _add(sums, parts[None, part - 1])
        r_p[None, part].store(parts[None, part].load().to(context.dtype))
        cute.copy(store, r_store[None, None, part], t_probabilities[None, None, part])
        if cutlass.const_expr(part + 1 == _HEAD_PARTS):
            finish_tmem_stores()
            arrive_leader(context, barriers.p_full, slot)
    finish_tmem_stores()
    arrive_leader(context, barriers.p_tail, slot)
    return _total(_add(sums, parts[None, _PARTS - 1]))


def _coordinates(columns: int):
    return cute.make_identity_tensor((BLOCK_Q, columns))


def _views(context: Context, slot, row):
    """(load, store, S, P): this thread's tensor-memory copies and its parts of the slot."""
    s = scores(context, slot)[(None, None), 0, 0]
    halves = cute.composition(s.layout, cute.make_layout((BLOCK_Q, BLOCK_K // 2)))
    p = cute.make_tensor(s.iterator + BLOCK_K // 2, halves)
    load_atom = cute.make_copy_atom(tcgen05.copy.Ld32x32bOp(tcgen05.copy.Repetition(_PART)), Float32)
    store_atom = cute.make_copy_atom(tcgen05.copy.St32x32bOp(tcgen05.copy.Repetition(_PART // 2)), Float32)
    load = tcgen05.make_tmem_copy(load_atom, s).get_slice(row)
    store = tcgen05.make_tmem_copy(store_atom, p).get_slice(row)
    return load, store, load.partition_S(s), store.partition_D(p)


def _kept_keys(context: Context, place: _Row, block) -> list[Uint32]:
    """Which keys of a block the mask leaves to the row: a word for each part."""
    low, high = place.mask.intervals[0]
    firsts = [block * BLOCK_K + part * _PART for part in range(_PARTS)]
    words = [kept.interval(low if context.work.masks_left else None, high, first) for first in firsts]
    if segments.in_mask(context.spec.mask):
        ids = [place.mask.key_id(first + cute.arch.lane_idx()) for first in firsts]
        words = [word & same for word, same in zip(words, kept.same_ids(place.mask.q_ids[0], ids), strict=True)]
    if not masks.is_interval(segments.without(context.spec.mask)):
        for part, first in enumerate(firsts):
            words[part] = words[part] & kept.where(_conditions(context, place, first))
            kept.end_block(place.q_row)
    return words


def _conditions(context: Context, place: _Row, first):
    """What predicates demand of the row's keys from `first` on."""
    position = _place(context, place, first)

    def of_key(i: int) -> list[Boolean]:
        return place.mask.conditions(0, first + i, None, position, place.work.geometry)

    return of_key


def _place(context: Context, place: _Row, key) -> mask.Place:
    return mask.Place(place.work.batch, (place.head,), (place.q_row,), key, context.spec.positions)


def _modify(context: Context, place: _Row, block, values) -> float:
    """Score mods, in place; returns what the values are to be multiplied by in the exponent."""
    spec = context.spec
    if not spec.score_mods:
        return LOG2_E * spec.scale
    functions = sequence.score_functions(spec)
    operands = sequence.operands(context.work.g, "score_operands", functions)
    for part in range(_PARTS):
        view = cute.make_tensor(values.iterator + part * _PART, cute.make_layout((1, _PART)))
        columns = tuple(range(part * _PART, (part + 1) * _PART))
        fragment = RowFragment(view, place.row, (0,), Int32(0), columns, 1)
        where = _place(context, place, block * BLOCK_K)
        mask.apply_scores(spec.score_mods, spec.scale, fragment, where, place.work.geometry, operands)
        if functions:
            kept.end_block(place.q_row)
    return LOG2_E


def _keep(values, words: list[Uint32]) -> None:
    """Sets the values whose bit is not set to -inf."""
    for part, word in enumerate(words):
        kept.keep(cute.make_tensor(values.iterator + part * _PART, cute.make_layout(_PART)), word)


def _maximum(values) -> Float32:
    """The largest of a row's values, in four chains."""
    chains = [_max3(*(values[0, 3 * i + j] for j in range(3))) for i in range(_CHAINS)]
    first = 3 * _CHAINS
    for i in range(first, BLOCK_K, 2):
        chain = (i - first) // 2 % _CHAINS
        chains[chain] = _max3(chains[chain], values[0, i], values[0, i + 1])
    return cute.arch.fmax(chains[3], _max3(*chains[:3]))


def _max3(a: Float32, b: Float32, c: Float32) -> Float32:
    return cute.arch.inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def _add(sums: list, part) -> list:
    """Adds a part's values to up to four pairs of partial sums."""
    sums = list(sums)
    for i in range(cute.size(part) // 2):
        pair = (part[2 * i], part[2 * i + 1])
        if len(sums) < _CHAINS:
            sums.append(pair)
        else:
            sums[i % _CHAINS] = cute.arch.add_packed_f32x2(sums[i % _CHAINS], pair)
    return sums


def _total(sums: list) -> Float32:
    left, right = (cute.arch.add_packed_f32x2(sums[i], sums[i + 1]) for i in (0, 2))
    low, high = cute.arch.add_packed_f32x2(left, right)
    return low + high


def _exponentials(part, exponent: _Exponent, subtract_first: bool, pairs_on_fma: int) -> None:
    """P of a part, in place; so many of its pairs on FMA units, evenly spread."""
    pairs = cute.size(part) // 2
    scale, base, bias = ((Float32(x),) * 2 for x in (exponent.scale_log2, -exponent.base, exponent.bias))
    for i in range(pairs):
        x = (part[2 * i], part[2 * i + 1])
        if subtract_first:
            x = cute.arch.mul_packed_f32x2(cute.arch.add_packed_f32x2(x, base), scale)
        else:
            x = cute.arch.fma_packed_f32x2(x, scale, bias)
        emulated = (i + 1) * pairs_on_fma // pairs > i * pairs_on_fma // pairs
        part[2 * i], part[2 * i + 1] = exp2_on_fma(x) if emulated else (exp2(x[0]), exp2(x[1]))


def exp2_on_fma(x: tuple) -> tuple:
    """2**x of a pair for x <= 127: Cody and Waite's split into integer and fraction, then a polynomial (Horner).

    Adding 2**23 + 2**22 rounded down leaves the integer part in the low mantissa bits, whence it moves to the exponent.
    """
    x = tuple(cute.arch.fmax(v, -127.0) for v in x)
    shift = (Float32(_ROUND_TO_INTEGER),) * 2
    shifted = cute.arch.add_packed_f32x2(x, shift, rnd="rm")
    fraction = cute.arch.sub_packed_f32x2(x, cute.arch.sub_packed_f32x2(shifted, shift))
    value = (Float32(_EXP2[-1]),) * 2
    for coefficient in reversed(_EXP2[:-1]):
        value = cute.arch.fma_packed_f32x2(value, fraction, (Float32(coefficient),) * 2)
    return tuple(
        ((s.bitcast(Int32) << 23) + v.bitcast(Int32)).bitcast(Float32)
        for s, v in zip(shifted, value, strict=True)
    )
