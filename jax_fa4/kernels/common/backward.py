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
from cutlass import Boolean, Float16, Float32, Int32

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
    """

    values: cute.Tensor | None
    slots: Callable[[int], tuple[int, int]]
    query: Int32
    key: Int32
    query_steps: Sequence[int]
    key_steps: Sequence[int]
    batch: Int32
    head: Int32

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
        fragment.values[i] = value
        slopes[i] = product.to(slopes.element_type)


def conditions(spec, fragment: Fragment, geometry: masks.Geometry, g) -> Callable[[int], list[Boolean]]:
    """What register i must satisfy to survive, beside lying in its interval: by segments and predicates."""
    predicates = [part.function for part in spec.mask.parts if isinstance(part, masks.Predicate)]
    segments = any(isinstance(part, masks.Segments) for part in spec.mask.parts)
    if segments:
        last_query, last_key = g.q_segment_ids.shape[1] - 1, g.kv_segment_ids.shape[1] - 1
        q_ids = [
            g.q_segment_ids[fragment.batch, cutlass.min(fragment.query + step, last_query)]
            for step in fragment.query_steps
        ]
        kv_ids = [
            g.kv_segment_ids[fragment.batch, cutlass.min(fragment.key + step, last_key)] for step in fragment.key_steps
        ]

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
    by_rows = len(fragment.query_steps) < len(fragment.key_steps)  # intervals of what a thread has fewer of
    if by_rows:
        start, steps = fragment.key, fragment.key_steps
        bounds = [masks.row_interval(spec.mask, fragment.query + step, geometry) for step in fragment.query_steps]
    else:
        start, steps = fragment.query, fragment.query_steps
        bounds = [masks.column_interval(spec.mask, fragment.key + step, geometry) for step in fragment.key_steps]
    others = conditions(spec, fragment, geometry, g)
    for i in range(fragment.size):
        slot, along = fragment.slots(i) if by_rows else fragment.slots(i)[::-1]
        low, high = bounds[slot]
        step = Int32(steps[along])
        keep = step < high - start
        if not (isinstance(low, int) and low == 0):
            keep = keep & (step >= low - start)
        for condition in others(i):
            keep = keep & condition
        fragment.values[i] = cutlass.select_(keep, fragment.values[i], Float32(softmax.NEG_INF))


def probabilities(fragment: Fragment, lse_log2: Any, scale_log2: float) -> None:
    """P = exp2(scale_log2 * score - lse_log2), in place; `lse_log2` is per query slot, +inf for rows without keys."""
    for i in range(fragment.size):
        exponent = fragment.values[i] * scale_log2 - lse_log2[fragment.slots(i)[0]]
        fragment.values[i] = softmax.exp2(exponent)


def score_gradients(p: Fragment, dp: cute.Tensor, delta: Any, slopes: cute.Tensor | None) -> None:
    """dS = P * (dP - delta) * dy/dx, in place of dP; `delta` is per query slot."""
    for i in range(p.size):
        ds = p.values[i] * (dp[i] - delta[p.slots(i)[0]])
        if slopes is not None:
            product = ds * slopes[i].to(Float32)
            if slopes.element_type is Float32:  # a user's function may have no finite slope where P is 0
                product = cutlass.select_(p.values[i] == 0.0, Float32(0.0), product)
            ds = product
        dp[i] = ds
