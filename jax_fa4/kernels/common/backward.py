"""The backward pass between its products: P from the scores and LSE, dS from P and dP. Shared by all architectures.

With x = scale * q.k, y = mods(x), P = exp(y - LSE) and delta = rowsum(O * dO) (less dLSE):
dS = dL/dx = P * (dP - delta) * dy/dx. The factor `scale` of dL/d(q.k) is applied once, where dQ and dK leave.

A thread holds scores in any arrangement: `Fragment` says which query and key each of its registers belongs to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Uint32

from jax_fa4 import masks, scores
from jax_fa4.kernels.common import mask, scalar_jaxpr, slope, softmax


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A thread's scores of one tile.

    Attributes:
      values: register tensor of float32, indexed 0, 1, ...; None where only places are asked for.
      slots: slots(i) is the (query slot, key slot) of register i.
      query, key: the row of query slot 0 and of key slot 0 in the sequence.
      query_steps, key_steps: distance of each slot from the first.
      batch, head: example and query head.
      quads: which are columns of a warpgroup product's accumulator, "queries" or "keys": slot 2 g + p is 8 g + p from
        the first, which is the same in every fourth lane. None: the fragment is arranged otherwise.
    """

    values: cute.Tensor | None
    slots: Callable[[int], tuple[int, int]]
    query: Int32
    key: Int32
    query_steps: Sequence[int]
    key_steps: Sequence[int]
    batch: Int32
    head: Int32
    quads: str | None = None

    @property
    def size(self) -> int:
        return cute.size(self.values)


def _indices(spec, fragment: Fragment, i: int, geometry: masks.Geometry) -> tuple:
    """(b, h, q, k) of a register as user functions get them: indices, or positions where the call gives positions."""
    q_slot, k_slot = fragment.slots(i)
    q, k = fragment.query + fragment.query_steps[q_slot], fragment.key + fragment.key_steps[k_slot]
    if spec.positions:
        q, k = geometry.q_offset + q * geometry.q_stride, geometry.kv_offset + k * geometry.kv_stride
    return fragment.batch, fragment.head, q, k


def _operands(g, prefix: str, start: int, count: int) -> tuple:
    return tuple(getattr(g, f"{prefix}_{i}") for i in range(start, start + count))


def slopes_like(spec, values: cute.Tensor) -> cute.Tensor | None:
    """Registers for dy/dx of each score, None where there are no score mods.

    The derivative of a soft cap lies in [0, 1] and is kept in float16 (its rounding is below that of dS).
    """
    if not spec.score_mods:
        return None
    capped_only = all(isinstance(mod, scores.SoftCap) for mod in spec.score_mods)
    return cute.make_rmem_tensor(values.shape, Float16 if capped_only else Float32)


def apply_score_mods(spec, fragment: Fragment, geometry: masks.Geometry, g, slopes: cute.Tensor | None) -> None:
    """Turns raw products into scores in place, and writes dy/dx of each (see `slopes_like`)."""
    if not spec.score_mods:
        return
    for i in range(fragment.size):
        fragment.values[i], slope = _modified(spec, fragment, i, geometry, g)
        slopes[i] = slope.to(slopes.element_type)


def _modified(spec, fragment: Fragment, i: int, geometry: masks.Geometry, g) -> tuple[Float32, Float32]:
    """Register i after all score mods, and its derivative by the scaled product."""
    value, product = fragment.values[i] * spec.scale, None
    read = 0
    for mod in spec.score_mods:
        if isinstance(mod, scores.SoftCap):
            value = mask.soft_cap(value, mod.cap)
            ratio = value * (1.0 / mod.cap)
            factor = 1.0 - ratio * ratio
        else:
            count = mod.function.operand_count
            arrays = _operands(g, "score_operands", read, count)
            read += count
            scalars = (value, *_indices(spec, fragment, i, geometry))
            factor = scalar_jaxpr.call(slope.slope(mod.function), scalars, arrays)
            value = scalar_jaxpr.call(mod.function, scalars, arrays)
        product = factor if product is None else product * factor
    return value, product


class _Ids:
    """Segment ids by slot, fetched when asked for; past the end of the sequence that of its last element."""

    def __init__(self, ids: cute.Tensor, batch: Int32, start: Int32, steps: Sequence[int]):
        self.ids, self.batch, self.start, self.steps = ids, batch, start, steps
        self.fetched = {}

    def __getitem__(self, slot: int) -> Int32:
        if slot not in self.fetched:
            self.fetched[slot] = self._fetch(slot)
        return self.fetched[slot]

    def _fetch(self, slot: int) -> Int32:
        return self._read(self.start + self.steps[slot])

    def _read(self, position: Int32) -> Int32:
        return self.ids[self.batch, cutlass.min(position, self.ids.shape[1] - 1)]


class _QuadIds(_Ids):
    """The same of an accumulator's columns (see `Fragment.quads`): the warp reads each id once, and its lanes exchange
    them. A thread has no registers for all of its own at once, nor for their addresses."""

    def __init__(self, ids: cute.Tensor, batch: Int32, start: Int32, steps: Sequence[int]):
        super().__init__(ids, batch, start, steps)
        lane = cute.arch.lane_idx()
        self.quad_lane, first = lane % 4, start + lane // 4 * 8
        self.held = [self._read(first + 64 * i + pair) for i in range(-(-len(steps) // 16)) for pair in range(2)]

    def _fetch(self, slot: int) -> Int32:
        group, pair = divmod(slot, 2)
        return cute.arch.shuffle_sync(self.held[group // 8 * 2 + pair], self.quad_lane + group % 8 * 4)


def conditions(spec, fragment: Fragment, geometry: masks.Geometry, g) -> Callable[[int], list[Boolean]]:
    """What register i must satisfy to survive, beside lying in its interval: by segments and predicates."""
    predicates = [part.function for part in spec.mask.parts if isinstance(part, masks.Predicate)]
    segments = any(isinstance(part, masks.Segments) for part in spec.mask.parts)
    if segments:
        kinds = {"queries": (_QuadIds, _Ids), "keys": (_Ids, _QuadIds), None: (_Ids, _Ids)}[fragment.quads]
        q_ids = kinds[0](g.q_segment_ids, fragment.batch, fragment.query, fragment.query_steps)
        kv_ids = kinds[1](g.kv_segment_ids, fragment.batch, fragment.key, fragment.key_steps)

    def of_register(i: int) -> list[Boolean]:
        q_slot, k_slot = fragment.slots(i)
        found = [q_ids[q_slot] == kv_ids[k_slot]] if segments else []
        read = 0
        for function in predicates:
            arrays = _operands(g, "mask_operands", read, function.operand_count)
            read += function.operand_count
            found.append(Boolean(scalar_jaxpr.call(function, _indices(spec, fragment, i, geometry), arrays)))
        return found

    return of_register


def apply_mask(spec, fragment: Fragment, geometry: masks.Geometry, g) -> None:
    """Sets scores that do not survive to -inf, so that their P is 0."""
    survives = _survivors(spec, fragment, geometry, g)
    for i in range(fragment.size):
        fragment.values[i] = cutlass.select_(survives(i), fragment.values[i], Float32(softmax.NEG_INF))


def _survivors(spec, fragment: Fragment, geometry: masks.Geometry, g) -> Callable[[int], Boolean]:
    """Whether register i survives."""
    by_rows = len(fragment.query_steps) < len(fragment.key_steps)  # intervals of what a thread has fewer of
    if by_rows:
        start, steps = fragment.key, fragment.key_steps
        bounds = [masks.row_interval(spec.mask, fragment.query + step, geometry) for step in fragment.query_steps]
    else:
        start, steps = fragment.query, fragment.query_steps
        bounds = [masks.column_interval(spec.mask, fragment.key + step, geometry) for step in fragment.key_steps]
    others = conditions(spec, fragment, geometry, g)

    def of_register(i: int) -> Boolean:
        slot, along = fragment.slots(i) if by_rows else fragment.slots(i)[::-1]
        low, high = bounds[slot]
        step = Int32(steps[along])
        keep = step < high - start
        if not (isinstance(low, int) and low == 0):
            keep = keep & (step >= low - start)
        for condition in others(i):
            keep = keep & condition
        return keep

    return of_register


def probabilities(fragment: Fragment, lse_log2: Any, scale_log2: float) -> None:
    """P = exp2(scale_log2 * score - lse_log2), in place; `lse_log2` is per query slot, +inf for rows without keys."""
    for i in range(fragment.size):
        exponent = fragment.values[i] * scale_log2 - lse_log2[fragment.slots(i)[0]]
        fragment.values[i] = softmax.exp2(exponent)


def weighted_probabilities(
    spec, fragment: Fragment, masked: bool, geometry: masks.Geometry, g, lse_log2: Any, rounded: cute.Tensor
) -> None:
    """Raw products to P * dy/dx in place, and to P, rounded: what dS and dV need where there are score mods.

    Each register's dy/dx is used up at once: a thread has no others to keep it in until dP comes. `masked`: with the
    element mask.
    """
    survives = _survivors(spec, fragment, geometry, g) if masked else None
    words = cute.recast_tensor(rounded, Uint32)
    for i in range(0, fragment.size, 2):
        pair = []
        for j in (i, i + 1):
            score, factor = _modified(spec, fragment, j, geometry, g)
            if survives is not None:
                score = cutlass.select_(survives(j), score, Float32(softmax.NEG_INF))
            p = softmax.exp2(score * softmax.LOG2_E - lse_log2[fragment.slots(j)[0]])
            pair.append(p)
            # A user's function may have no finite slope where P is 0.
            fragment.values[j] = cutlass.select_(p == 0.0, Float32(0.0), p * factor)
        words[i // 2] = softmax.pack(*pair, rounded.element_type)


def score_gradients(p: Fragment, dp: cute.Tensor, delta: Any) -> None:
    """dS = P * (dP - delta), in place of dP; `delta` is per query slot. P comes times dy/dx where there are mods."""
    for i in range(p.size):
        dp[i] = p.values[i] * (dp[i] - delta[p.slots(i)[0]])
