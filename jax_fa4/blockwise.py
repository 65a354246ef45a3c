"""The XLA backend: attention in tiles with an online softmax, O(S) memory, every feature.

One `lax.scan` over the list of (query block, KV block) pairs that the mask can touch; what it rules out only at run
time (lengths, segments, run-time windows and positions) is skipped by a `cond`. Backward recomputes each tile from q, k
and LSE. Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023.
Both passes are plain JAX, so that JAX derives forward-mode and second derivatives from them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from . import masks, scores
from .masks import RUNTIME, Geometry
from .operands import Operands, geometry, tile
from .spec import AttentionSpec
from .varying import match_varying, spec_of, with_auto_axes, zeros_like_type

TILE_BYTES = 1 << 20
"""Aim for a tile of scores over all examples and heads, in float32: small enough for a CPU's cache."""

LONGEST_BLOCK, SHORTEST_BLOCK = 512, 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """What `backward` returns: cotangents of q, k, v, and of bias and score operands where there are any.

    Score operands that are not floating have None.
    """

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dbias: jax.Array | None = None
    dscore_operands: tuple[jax.Array | None, ...] = ()


@functools.partial(jax.jit, static_argnums=0)
def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention of a spec.

    Returns:
      o [B, S, H, E] in spec.out_dtype, and LSE [B, H, S] in spec.compute_dtype: natural logarithm, with the sink; -inf
      for rows without keys (the sink where there is one).
    """
    batch, rows, heads, _ = spec_of(operands.q)
    specs = PartitionSpec(batch, rows, heads), PartitionSpec(batch, heads, rows)
    return with_auto_axes(functools.partial(_forward, spec), specs)(match_varying(operands))


@functools.partial(jax.jit, static_argnums=0)
def backward(
    spec: AttentionSpec, operands: Operands, lse: jax.Array, delta: jax.Array, do: jax.Array
) -> Gradients:
    """Gradients of attention.

    Args:
      spec: as in forward.
      operands: as in forward.
      lse: [B, H, S] of the whole softmax (all keys of a ring, with the sink).
      delta: [B, H, S], rowsum(o * do) - dlse, in spec.compute_dtype.
      do: [B, S, H, E], cotangent of o.
    """
    arrays = match_varying((operands, lse, delta, do))
    specs = jax.tree.map(spec_of, Gradients(operands.q, operands.k, operands.v, operands.bias, _learned(operands)))
    return with_auto_axes(functools.partial(_backward, spec), specs)(*arrays)


@dataclass(frozen=True)
class Blocks:
    """How S x T is cut: block sizes, and the int32 pairs [N, 2] of (query block, KV block) to visit, by query block."""

    block_q: int
    block_k: int
    count_q: int
    count_k: int
    pairs: np.ndarray

    @classmethod
    def cut(cls, spec: AttentionSpec, operands: Operands) -> "Blocks":
        batch, rows, heads, _ = operands.q.shape
        columns = operands.k.shape[1]
        longest = math.sqrt(TILE_BYTES / 4 / max(1, heads * (batch if isinstance(batch, int) else 1)))
        longest = max(SHORTEST_BLOCK, min(LONGEST_BLOCK, 1 << round(math.log2(max(1.0, longest)))))
        known = isinstance(rows, int) and isinstance(columns, int)
        # A symbolic length (`jax.export`) is one block: the pairs below are part of the program.
        count_q, count_k = (-(-n // longest) if isinstance(n, int) else 1 for n in (rows, columns))
        block_q, block_k = -(-rows // count_q), -(-columns // count_k)
        ranges = [(0, count_k)] * count_q
        if known and _is_static(spec):
            fixed = Geometry.bottom_right(rows, columns)
            for i in range(count_q):
                start, _, _, end = masks.block_range(spec.mask, i, block_q, block_k, fixed)
                ranges[i] = (start, end)
        pairs = [(i, j) for i, (start, end) in enumerate(ranges) for j in range(start, end)]
        return cls(block_q, block_k, count_q, count_k, np.array(pairs, np.int32).reshape(-1, 2))


def _is_static(spec: AttentionSpec) -> bool:
    """Whether shapes and spec alone say which blocks the interval masks touch."""
    return not spec.positions and not any(
        isinstance(part, masks.Lengths) or (isinstance(part, masks.Window) and RUNTIME in (part.left, part.right))
        for part in spec.mask.parts)


def _scan(step: Callable, carry: Any, blocks: Blocks, active: jax.Array | None) -> Any:
    """Carries through `step(carry, i, j)` over the pairs, skipping those that are not active."""
    if active is None:
        return lax.scan(lambda c, ij: (step(c, ij[0], ij[1]), None), carry, jnp.asarray(blocks.pairs))[0]

    def maybe(carry, x):
        (i, j), is_active = x
        return lax.cond(is_active, lambda c: step(c, i, j), lambda c: c, carry), None

    return lax.scan(maybe, carry, (tuple(jnp.asarray(blocks.pairs.T)), active))[0]


@dataclass(frozen=True)
class _Call:
    """One call cut into blocks: the part that forward and backward share, scores of a tile."""

    spec: AttentionSpec
    operands: Operands  # padded to whole blocks
    geometry: Geometry
    blocks: Blocks
    ragged: bool

    @classmethod
    def make(cls, spec: AttentionSpec, operands: Operands) -> "_Call":
        blocks = Blocks.cut(spec, operands)
        rows, columns = operands.q.shape[1], operands.k.shape[1]
        more_rows = blocks.count_q * blocks.block_q - rows
        more_columns = blocks.count_k * blocks.block_k - columns
        where = geometry(operands)  # of the true lengths

        def pad(x, q_axis, k_axis, mode="constant"):
            if x is None:
                return None
            widths = [(0, 0)] * x.ndim
            if q_axis is not None and x.shape[q_axis] == rows:
                widths[q_axis] = (0, more_rows)
            if k_axis is not None:
                widths[k_axis] = (0, more_columns)
            return jnp.pad(x, widths, mode=mode) if more_rows or more_columns else x

        padded = dataclasses.replace(
            operands, q=pad(operands.q, 1, None), k=pad(operands.k, None, 1), v=pad(operands.v, None, 1),
            bias=pad(operands.bias, 2, 3), mask_array=pad(operands.mask_array, 2, 3),
            q_segment_ids=pad(operands.q_segment_ids, 1, None, "edge"),
            kv_segment_ids=pad(operands.kv_segment_ids, None, 1, "edge"))
        return cls(spec, padded, where, blocks, bool(more_rows or more_columns))

    def active(self) -> jax.Array | None:
        """bool [N]: which pairs of blocks some example needs; None if all of them do as far as can be told."""
        blocks, o = self.blocks, self.operands
        i, j = blocks.pairs.T
        needed = None
        if not _is_static(self.spec):
            start, _, _, end = masks.block_range(
                self.spec.mask, i[None, None, None], blocks.block_q, blocks.block_k, self.geometry)
            needed = (start <= j[None, None, None]) & (j[None, None, None] < end)
        if masks.Segments() in self.spec.mask.parts:
            (q_low, q_high), (k_low, k_high) = (
                [reduce(ids.reshape(*ids.shape[:1], count, -1), axis=2) for reduce in (jnp.min, jnp.max)]
                for ids, count in ((o.q_segment_ids, blocks.count_q), (o.kv_segment_ids, blocks.count_k)))
            meet = ((q_low[:, i] <= k_high[:, j]) & (k_low[:, j] <= q_high[:, i]))[:, None, None]
            needed = meet if needed is None else needed & meet
        return None if needed is None else needed.reshape(-1, len(i)).any(axis=0)

    def q_blocks(self, x: jax.Array) -> jax.Array:
        """[B, S, H, D] in blocks, the query heads of one KV head as more rows: [count_q, B, K, G * block_q, D]."""
        b, h, g = x.shape[0], x.shape[2], self.spec.group
        x = x.reshape(b, self.blocks.count_q, self.blocks.block_q, h // g, g, -1)
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(self.blocks.count_q, b, h // g, g * self.blocks.block_q, -1)

    def from_q_blocks(self, x: jax.Array, rows: int) -> jax.Array:
        count, b, kv_heads, _, d = x.shape
        x = x.reshape(count, b, kv_heads, self.spec.group, self.blocks.block_q, d).transpose(1, 0, 4, 2, 3, 5)
        return x.reshape(b, count * self.blocks.block_q, kv_heads * self.spec.group, d)[:, :rows]

    def k_blocks(self, x: jax.Array) -> jax.Array:
        """[B, T, K, D] in blocks: [count_k, B, K, block_k, D]."""
        b, _, h, d = x.shape
        return x.reshape(b, self.blocks.count_k, self.blocks.block_k, h, d).transpose(1, 0, 3, 2, 4)

    def from_k_blocks(self, x: jax.Array, columns: int) -> jax.Array:
        count, b, h, block, d = x.shape
        return x.transpose(1, 0, 3, 2, 4).reshape(b, count * block, h, d)[:, :columns]

    def row_blocks(self, x: jax.Array, fill: float) -> jax.Array:
        """[B, H, S] in blocks: [count_q, B, K, G * block_q, 1]."""
        more = self.operands.q.shape[1] - x.shape[2]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, more)), constant_values=fill) if more else x
        return self.q_blocks(x.transpose(0, 2, 1)[..., None])

    def from_row_blocks(self, x: jax.Array, rows: int) -> jax.Array:
        return self.from_q_blocks(x, rows)[..., 0].transpose(0, 2, 1)

    def tile(self, i: jax.Array, j: jax.Array) -> scores.Tile:
        rows = i * self.blocks.block_q + jnp.arange(self.blocks.block_q, dtype=jnp.int32)
        columns = j * self.blocks.block_k + jnp.arange(self.blocks.block_k, dtype=jnp.int32)
        return tile(self.operands, rows, columns)

    def raw_scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """scale * q.k, [B, H, block_q, block_k], of one query block and one KV block."""
        s = _dot("bkrd,bkcd->bkrc", q, k, self.spec) * jnp.asarray(self.spec.scale, self.spec.compute_dtype)
        return s.reshape(s.shape[0], -1, self.blocks.block_q, self.blocks.block_k)

    def mod(self, raw: jax.Array, at: scores.Tile, bias: jax.Array | None, score_operands: tuple) -> jax.Array:
        return scores.apply(self.spec.score_mods, raw, at, bias, score_operands)

    def mask(self, s: jax.Array, at: scores.Tile) -> jax.Array:
        """Scores with -inf where the mask rules them out."""
        if not self.spec.mask.parts and not self.ragged:
            return s
        return jnp.where(masks.allowed(self.spec.mask, at, self.geometry, self.operands), s, -jnp.inf)

    def rows_of(self, x: jax.Array) -> jax.Array:
        """[B, H, block_q, N] as [B, K, G * block_q, N]."""
        b, h, r, n = x.shape
        return x.reshape(b, h // self.spec.group, self.spec.group * r, n)


def _dot(formula: str, x: jax.Array, y: jax.Array, spec: AttentionSpec) -> jax.Array:
    """A product of two arrays of the input dtype, accumulated in the compute dtype."""
    exact = lax.Precision.HIGHEST if spec.dtype in ("float32", "float64") else None
    return jnp.einsum(formula, x, y, preferred_element_type=spec.compute_dtype, precision=exact)


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x: jax.Array, i: jax.Array, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, value, i, 0)


def _forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    (b, rows, h), e = operands.q.shape[:3], spec.value_head_dim
    if 0 in (b, rows, h, operands.k.shape[1]):
        lse = jnp.full((b, h, rows), -jnp.inf, spec.compute_dtype)
        return jnp.zeros((b, rows, h, e), spec.out_dtype), lse if operands.sinks is None else lse.at[:].set(
            operands.sinks[None, :, None])
    call = _Call.make(spec, operands)
    q, k, v = call.q_blocks(call.operands.q), call.k_blocks(call.operands.k), call.k_blocks(call.operands.v)

    def step(carry, i, j):
        acc, top, total = carry
        at = call.tile(i, j)
        s = call.mod(call.raw_scores(_at(q, i), _at(k, j)), at, scores.bias_tile(call.operands.bias, at),
                     call.operands.score_operands)
        s = call.rows_of(call.mask(s, at))
        old = _at(top, i)
        new = lax.stop_gradient(jnp.maximum(old, s.max(axis=-1, keepdims=True)))
        finite = jnp.where(new == -jnp.inf, 0, new)
        p, keep = jnp.exp(s - finite), jnp.exp(old - finite)
        pv = _dot("bkrc,bkce->bkre", p.astype(spec.dtype), _at(v, j), spec)
        return (_put(acc, i, _at(acc, i) * keep + pv), _put(top, i, new),
                _put(total, i, _at(total, i) * keep + p.sum(axis=-1, keepdims=True)))

    shape = (*q.shape[:-1], 1)
    start = (zeros_like_type(q, (*q.shape[:-1], e), spec.compute_dtype),
             zeros_like_type(q, shape, spec.compute_dtype) - jnp.inf, zeros_like_type(q, shape, spec.compute_dtype))
    acc, top, total = _scan(step, start, call.blocks, call.active())
    if operands.sinks is not None:
        sinks = jnp.repeat(operands.sinks.reshape(-1, spec.group), call.blocks.block_q, axis=1)[None, None, :, :, None]
        old, top = top, lax.stop_gradient(jnp.maximum(top, sinks))
        finite = jnp.where(top == -jnp.inf, 0, top)
        keep = jnp.exp(old - finite)
        acc, total = acc * keep, total * keep + jnp.exp(sinks - finite)
    some = total > 0
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
    return call.from_q_blocks(acc / total, rows).astype(spec.out_dtype), call.from_row_blocks(lse, rows)


def _backward(spec: AttentionSpec, operands: Operands, lse: jax.Array, delta: jax.Array, do: jax.Array) -> Gradients:
    rows, columns = operands.q.shape[1], operands.k.shape[1]
    learned = _learned(operands)
    if 0 in (*operands.q.shape[:3], columns):
        zeros = jax.tree.map(jnp.zeros_like, (operands.q, operands.k, operands.v))
        rest = jax.tree.map(jnp.zeros_like, (operands.bias, learned))
        return Gradients(*(x.astype(spec.out_dtype) for x in zeros), *rest)
    call = _Call.make(spec, operands)
    q, k, v = call.q_blocks(call.operands.q), call.k_blocks(call.operands.k), call.k_blocks(call.operands.v)
    more = call.operands.q.shape[1] - rows
    do = call.q_blocks(jnp.pad(do, ((0, 0), (0, more), (0, 0), (0, 0))) if more else do).astype(spec.dtype)
    lse = call.row_blocks(jnp.where(lse == -jnp.inf, jnp.inf, lse), jnp.inf)  # no keys: exp(s - inf) = 0
    delta = call.row_blocks(delta, 0)
    scale = jnp.asarray(spec.scale, spec.compute_dtype)

    def step(carry, i, j):
        dq, dk, dv, dbias, dlearned = carry
        q_i, do_i, k_j, v_j = _at(q, i), _at(do, i), _at(k, j), _at(v, j)
        at = call.tile(i, j)

        def mod(raw, bias, learned):
            arrays = tuple(x if y is None else y for x, y in zip(call.operands.score_operands, learned, strict=True))
            return call.mod(raw, at, bias, arrays)

        s, pull = jax.vjp(mod, call.raw_scores(q_i, k_j), scores.bias_tile(call.operands.bias, at), learned)
        p = jnp.exp(call.rows_of(call.mask(s, at)) - _at(lse, i))
        dp = _dot("bkre,bkce->bkrc", do_i, v_j, spec)
        ds = p * (dp - _at(delta, i))
        ds, dbias_tile, dlearned_tile = pull(ds.reshape(s.shape))
        ds = call.rows_of(ds * scale).astype(spec.dtype)
        if dbias is not None:
            dbias = _add_tile(dbias, dbias_tile, at)
        return (_put(dq, i, _at(dq, i) + _dot("bkrc,bkcd->bkrd", ds, k_j, spec)),
                _put(dk, j, _at(dk, j) + _dot("bkrc,bkrd->bkcd", ds, q_i, spec)),
                _put(dv, j, _at(dv, j) + _dot("bkrc,bkre->bkce", p.astype(spec.dtype), do_i, spec)),
                dbias, jax.tree.map(lambda a, b: a + b.astype(a.dtype), dlearned, dlearned_tile))

    start = jax.tree.map(lambda x: zeros_like_type(x, x.shape, spec.compute_dtype),
                         (q, k, v, call.operands.bias, learned))
    dq, dk, dv, dbias, dlearned = _scan(step, start, call.blocks, call.active())
    if dbias is not None:
        dbias = dbias[:, :, : operands.bias.shape[2], :columns].astype(operands.bias.dtype)
    return Gradients(
        call.from_q_blocks(dq, rows).astype(spec.out_dtype), call.from_k_blocks(dk, columns).astype(spec.out_dtype),
        call.from_k_blocks(dv, columns).astype(spec.out_dtype), dbias,
        jax.tree.map(lambda d, x: d.astype(x.dtype), dlearned, learned))


def _learned(operands: Operands) -> tuple[jax.Array | None, ...]:
    """The score operands that have a gradient; None in place of the others."""
    return tuple(x if jnp.issubdtype(x.dtype, jnp.floating) else None for x in operands.score_operands)


def _add_tile(dbias: jax.Array, part: jax.Array, at: scores.Tile) -> jax.Array:
    """Adds a tile's cotangent [B|1, H|1, Q|1, K] to that of the whole bias."""
    zero = jnp.zeros_like(at.columns[0])  # all of one dtype, which a Python 0 would not be in 64-bit mode
    first = (zero, zero, at.rows[0] if dbias.shape[2] != 1 else zero, at.columns[0])
    old = lax.dynamic_slice(dbias, first, part.shape)
    return lax.dynamic_update_slice(dbias, old + part.astype(dbias.dtype), first)
