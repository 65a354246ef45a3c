"""Exchanging heads for rows: DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509).

Before attention each device of the axis gives away its rows of most heads and gets all the group's rows of a few
heads; afterwards the output goes back. All of it is all_to_all, which JAX differentiates.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ..operands import Operands
from .placement import SequenceAxes


def rows_for_heads(operands: Operands, axes: SequenceAxes) -> Operands:
    """The operands of a device's share of the heads over all rows of the exchange axis."""
    if not axes.exchange:
        return operands
    ((axis, size),) = axes.exchange.items()
    o = operands
    kv_heads = o.k.shape[2]
    copies = 1 if kv_heads % size == 0 else size // kv_heads

    def exchange(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)

    def repeat(x: jax.Array) -> jax.Array:
        # Not jnp.repeat: outside jit it fails inside a shard_map that leaves an Explicit axis alone.
        batch, rows, heads, dim = x.shape
        copied = jnp.broadcast_to(x[:, :, :, None], (batch, rows, heads, copies, dim))
        return copied.reshape(batch, rows, heads * copies, dim)

    def gather(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else lax.all_gather(x, axis, axis=1, tiled=True)

    sinks = o.sinks
    if sinks is not None:
        share = sinks.shape[0] // size
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(axis) * share, share)
    return dataclasses.replace(
        o,
        q=exchange(o.q),
        k=exchange(repeat(o.k)),
        v=exchange(repeat(o.v)),
        sinks=sinks,
        q_segment_ids=gather(o.q_segment_ids),
        kv_segment_ids=gather(o.kv_segment_ids),
    )


def heads_for_rows(o: jax.Array, lse: jax.Array, axes: SequenceAxes) -> tuple[jax.Array, jax.Array]:
    """Undoes the exchange for the output [B, S, H, E] and LSE [B, H, S]."""
    for axis in axes.exchange:
        o = lax.all_to_all(o, axis, split_axis=1, concat_axis=2, tiled=True)
        lse = lax.all_to_all(lse, axis, split_axis=2, concat_axis=1, tiled=True)
    return o, lse
