"""The arrays of one attention call, as a pytree, and the geometry they imply."""

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from .masks import JAX, Geometry
from .scalar import Tile


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands:
    """Arrays that a spec asks for, in the order in which kernels take them; None or () where it does not.

    Attributes:
      q: [B, S, H, D].
      k: [B, T, K, D].
      v: [B, T, K, E].
      bias: [B|1, H|1, S|1, T], floating (spec.score_mods has `Bias`).
      sinks: [H] float32, float64 for float64 inputs (spec.sink).
      q_segment_ids, kv_segment_ids: int32 [B, S] and [B, T] (spec.mask has `Segments`).
      q_lengths, kv_lengths: int32 [B], within [0, S] and [0, T] (spec.mask has `Lengths`).
      positions: int32 [B, 4]: q offset, q stride, kv offset, kv stride (spec.positions). Without it positions are
        aligned bottom-right, by each example's own lengths.
      window: int32 [2]: left and right bounds (spec.mask has a `Window` with RUNTIME bounds; a static side is unused).
      mask_array: bool [B|1, H|1, S|1, T] (spec.mask has `MaskArray`).
      mask_operands: the arrays that predicates read, in the spec's order.
      score_operands: the arrays that score maps read, in the spec's order.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None = None
    sinks: jax.Array | None = None
    q_segment_ids: jax.Array | None = None
    kv_segment_ids: jax.Array | None = None
    q_lengths: jax.Array | None = None
    kv_lengths: jax.Array | None = None
    positions: jax.Array | None = None
    window: jax.Array | None = None
    mask_array: jax.Array | None = None
    mask_operands: tuple[jax.Array, ...] = ()
    score_operands: tuple[jax.Array, ...] = ()

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"Operands({', '.join(f'{name}={_describe(x)}' for name, x in given if jax.tree.leaves(x))})"


def _describe(x: Any) -> str:
    return f"({', '.join(map(_describe, x))})" if isinstance(x, tuple) else f"{x.dtype}{list(x.shape)}"


def geometry(operands: Operands) -> Geometry:
    """The geometry of a call for tiles [B, H, Q, K]: fields are scalars, or [B, 1, 1, 1] where examples differ."""
    o = operands

    def spread(x: jax.Array) -> jax.Array:
        return x[:, None, None, None]

    q_length = o.q.shape[1] if o.q_lengths is None else spread(o.q_lengths)
    kv_length = o.k.shape[1] if o.kv_lengths is None else spread(o.kv_lengths)
    rest: dict[str, Any] = {"numbers": JAX}
    if o.window is not None:
        rest |= {"window_left": o.window[0], "window_right": o.window[1]}
    if o.positions is None:
        return Geometry.bottom_right(q_length, kv_length, **rest)
    q_offset, q_stride, kv_offset, kv_stride = (spread(o.positions[:, i]) for i in range(4))
    return Geometry(q_length, kv_length, q_offset, q_stride, kv_offset, kv_stride, **rest)


def tile(operands: Operands, rows: jax.Array, columns: jax.Array) -> Tile:
    """The tile of consecutive int32 `rows` [Q] and `columns` [K] of a call, over all examples and heads."""
    batch, _, heads, _ = operands.q.shape
    q, k = rows, columns
    if operands.positions is not None:
        q_offset, q_stride, kv_offset, kv_stride = (operands.positions[:, i, None] for i in range(4))
        q, k = q_offset + q_stride * rows[None], kv_offset + kv_stride * columns[None]
    examples, query_heads = jnp.arange(batch, dtype=jnp.int32), jnp.arange(heads, dtype=jnp.int32)
    return Tile(examples, query_heads, rows, columns, q, k)
