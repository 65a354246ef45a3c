"""The run-time geometry of an example: lengths, positions and window bounds, read once per tile."""

from __future__ import annotations

from typing import Any

import cutlass

from jax_fa4 import masks
from jax_fa4.kernels.common.mask import NUMBERS, ElementMask
from jax_fa4.scores import ScoreMap


def geometry(spec, g, dims, batch) -> masks.Geometry:
    """The `masks.Geometry` of example `batch` from a kernel's global tensors `g` and sizes `dims`."""
    lengths = [part for part in spec.mask.parts if isinstance(part, masks.Lengths)]
    q_length = g.q_lengths[batch] if any(part.q for part in lengths) else dims.S
    kv_length = g.kv_lengths[batch] if any(part.kv for part in lengths) else dims.T
    rest = {"numbers": NUMBERS}
    windows = [part for part in spec.mask.parts if isinstance(part, masks.Window)]
    if any(masks.RUNTIME in (part.left, part.right) for part in windows):
        rest |= {"window_left": g.window[0], "window_right": g.window[1]}
    if not spec.positions:
        return masks.Geometry.bottom_right(q_length, kv_length, **rest)
    return masks.Geometry(q_length, kv_length, *(g.positions[batch, i] for i in range(4)), **rest)


def operands(g: Any, prefix: str, functions: list) -> tuple:
    """The global tensors that user functions read, in order."""
    return tuple(getattr(g, f"{prefix}_{i}") for i in range(sum(f.operand_count for f in functions)))


def score_functions(spec: Any) -> list:
    """The user functions among a spec's score mods."""
    return [mod.function for mod in spec.score_mods if isinstance(mod, ScoreMap)]


def element_mask(spec: Any, g: Any, batch, rows: tuple, geometry: masks.Geometry) -> ElementMask:
    """The element mask of a lane's query rows (rows past the end of the sequence take the last row's segment)."""
    intervals = tuple(masks.row_interval(spec.mask, row, geometry) for row in rows)
    q_ids, kv_ids = (), None
    if any(isinstance(part, masks.Segments) for part in spec.mask.parts):
        last = g.q_segment_ids.shape[1] - 1
        q_ids = tuple(g.q_segment_ids[batch, cutlass.min(row, last)] for row in rows)
        kv_ids = g.kv_segment_ids[batch, None]
    functions = [part.function for part in spec.mask.parts if isinstance(part, masks.Predicate)]
    return ElementMask(spec.mask, intervals, q_ids, kv_ids, operands(g, "mask_operands", functions))
