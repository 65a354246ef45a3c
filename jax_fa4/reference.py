"""Dense attention from a spec: the oracle in float64, and what exact arithmetic in the input's precision would give.

All of S x T is formed here, so these are for tests and for `python -m jax_fa4 check`. Masks come from `masks.dense`,
everything else is written anew, without tiles, online softmax or recomputation.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import masks, scores
from .blockwise import Gradients
from .operands import Operands, tile
from .spec import AttentionSpec
from .vjp import Forward, operand_gradients

Results = dict[str, np.ndarray]
"""Named results: o, lse, dq, dk, dv, and where the call has them dbias, dsinks, dscore_operands_<i>."""


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Dense attention (o, lse) in spec.compute_dtype throughout, differentiable by JAX."""
    s = _scores(spec, operands, operands.bias, operands.score_operands)
    p, total, top = _softmax(spec, operands, s)
    some = total > 0
    safe = jnp.where(some, total, 1)
    v = _per_query_head(operands.v, spec)
    o = jnp.einsum("bhst,bthe->bshe", p / safe, v, precision="highest")
    lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)[..., 0]
    return o.astype(spec.out_dtype), lse


def oracle(spec: AttentionSpec, operands: Operands, cotangents: tuple[Any, Any] | None = None) -> Results:
    """Results in float64, by dense attention and JAX's own differentiation of it.

    Args:
      spec: any.
      operands: concrete arrays of any precision.
      cotangents: (do [B, S, H, E], dlse [B, H, S]); without them there are no gradients.
    """
    with jax.enable_x64(True):
        wide = dataclasses.replace(spec, dtype="float64")
        operands, cotangents = jax.tree.map(_widen, (operands, cotangents))
        return results(*differentiate(forward, wide, operands, cotangents))


@functools.partial(jax.jit, static_argnums=(0, 1))
def differentiate(
    function: Forward, spec: AttentionSpec, operands: Operands, cotangents: tuple[Any, Any] | None
) -> tuple[Any, ...]:
    """(o, lse) of `function(spec, operands)`, and with cotangents those of operands (None for those not floating)."""
    if cotangents is None:
        return function(spec, operands)
    leaves, treedef = jax.tree.flatten(operands)
    moving = [_is_floating(x) for x in leaves]

    def of_moving(*values):
        values = iter(values)
        merged = [next(values) if m else x for x, m in zip(leaves, moving, strict=True)]
        return function(spec, jax.tree.unflatten(treedef, merged))

    (o, lse), pull = jax.vjp(of_moving, *(x for x, m in zip(leaves, moving, strict=True) if m))
    gradients = iter(pull((cotangents[0].astype(o.dtype), cotangents[1].astype(lse.dtype))))
    return o, lse, jax.tree.unflatten(treedef, [next(gradients) if m else None for m in moving])


def same_precision(
    spec: AttentionSpec, operands: Operands, cotangents: tuple[Any, Any] | None = None, draw: int = 0
) -> Results:
    """Results with the roundings that a kernel is allowed, and no others; arguments as for `oracle`.

    Scores, softmax and accumulation are in float32, P and dS are rounded to the input's dtype before they are
    multiplied, and delta is computed from the rounded O. (Everything is float64 for float64 inputs.)

    Draw 0 is just that. Where a rounding falls depends on what a kernel is free to choose (the maximum that a row's P
    is relative to, when dS is scaled, the order of sums), so each further draw moves them at random: odd draws all of
    them, even ones those of results (O, dQ, dK, dV) excepted.
    """
    factors = np.ones((2, FACTORS))
    if draw:
        factors[: 1 + draw % 2] = 2 ** np.random.default_rng(draw).random(FACTORS)
    return results(*_same_precision(spec, operands, cotangents, *jnp.asarray(factors, spec.compute_dtype)))


@functools.partial(jax.jit, static_argnums=0)
def _same_precision(spec, operands, cotangents, factors, of_results):
    to = _Rounding(spec, factors, of_results)
    s = _scores(spec, operands, operands.bias, operands.score_operands)
    p, total, top = _softmax(spec, operands, s)
    safe = jnp.where(total > 0, total, 1)
    v = _per_query_head(operands.v, spec)
    o = jnp.einsum("bhst,bthe->bhse", to.narrow(p), v, precision="highest") / safe
    o = to.out(o.transpose(0, 2, 1, 3))
    lse = to.wide(jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)[..., 0])
    if cotangents is None:
        return o, lse
    # Wide operands have wide gradients, which `to` alone rounds.
    q, k, v = (x.astype(spec.compute_dtype) for x in (operands.q, operands.k, operands.v))
    operands = dataclasses.replace(operands, q=q, k=k, v=v)
    rounded = functools.partial(backward, to=to)
    return o, lse, operand_gradients(rounded, spec, operands, (o, lse), cotangents)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    do: jax.Array,
    to: "_Rounding | None" = None,
) -> Gradients:
    """A backend's backward (`blockwise.backward`), dense, with the roundings of a draw, by default of draw 0."""
    to = to or _Rounding(spec, *jnp.ones((2, FACTORS), spec.compute_dtype))
    learned = tuple(x if jnp.issubdtype(x.dtype, jnp.floating) else None for x in operands.score_operands)

    def mod(raw, bias, learned):
        arrays = tuple(x if y is None else y for x, y in zip(operands.score_operands, learned, strict=True))
        return scores.apply(spec.score_mods, raw, _whole(operands), bias, arrays)

    s, pull = jax.vjp(mod, _raw_scores(spec, operands), operands.bias, learned)
    s = jnp.where(masks.dense(spec.mask, operands), s, -jnp.inf)
    p = jnp.exp(s - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None])
    do = do.astype(spec.compute_dtype)
    v, k = _per_query_head(operands.v, spec), _per_query_head(operands.k, spec)
    q = operands.q.astype(spec.compute_dtype)
    ds = p * (jnp.einsum("bshe,bthe->bhst", do, v, precision="highest") - delta[..., None])
    ds, dbias, dlearned = pull(ds)
    ds = to.narrow(ds * spec.scale)
    dv = _per_kv_head(jnp.einsum("bhst,bshe->bthe", to.narrow(p), do, precision="highest"), spec)
    dk = _per_kv_head(jnp.einsum("bhst,bshd->bthd", ds, q, precision="highest"), spec)
    dq = jnp.einsum("bhst,bthd->bshd", ds, k, precision="highest")
    return Gradients(to.out(dq), to.out(dk), to.out(dv), dbias, dlearned)


FACTORS = 65_521
"""How many random factors a draw has; arrays with more values than that use them again."""


class _Rounding:
    """Roundings to nearest, each value's on a grid that is scaled by one of the draw's factors.

    Scaling by a factor from [1, 2) and back leaves the spacing of a floating type's values what it is on the average.
    """

    def __init__(self, spec: AttentionSpec, factors: jax.Array, of_results: jax.Array):
        self.spec, self.factors, self.of_results = spec, factors, of_results
        self.count = 0

    def narrow(self, x: jax.Array) -> jax.Array:
        """To the inputs' dtype."""
        return self._round(x, self.spec.dtype, self.factors)

    def wide(self, x: jax.Array) -> jax.Array:
        """To the dtype of scores and statistics."""
        return self._round(x, self.spec.compute_dtype, self.factors)

    def out(self, x: jax.Array) -> jax.Array:
        """To the dtype of O, dQ, dK, dV (the values are, the array keeps its own)."""
        return self._round(x, self.spec.out_dtype, self.of_results)

    def _round(self, x: jax.Array, dtype: Any, factors: jax.Array) -> jax.Array:
        self.count += 1
        factors = jnp.roll(factors, round(0.618 * FACTORS) * self.count)  # others for each array
        times = -(-x.size // FACTORS)
        factors = jnp.broadcast_to(factors, (times, FACTORS)).ravel()[: x.size].reshape(x.shape).astype(x.dtype)
        return _nearest(x * factors, jnp.finfo(dtype)) / factors


def _nearest(x: jax.Array, info: Any) -> jax.Array:
    """Values of another floating type, in the type of x. (A pair of conversions, to it and back, XLA may leave out.)"""
    normal = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(x.dtype).nexp:
        return normal
    step = float(info.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), jnp.round(x / step) * step, normal)


def results(o: Any, lse: Any, gradients: Operands | None = None) -> Results:
    """Names results, as float64 numpy arrays; `gradients` holds cotangents in the places of their operands."""
    named: dict[str, Any] = {"o": o, "lse": lse}
    if gradients is not None:
        named |= {"d" + name: getattr(gradients, name) for name in ("q", "k", "v", "bias", "sinks")}
        named |= {f"dscore_operands_{i}": x for i, x in enumerate(gradients.score_operands)}
    return {name: np.asarray(x).astype(np.float64) for name, x in named.items() if _is_floating(x)}


def cotangents(operands: Operands, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random (do, dlse) for a call, Gaussian: do of q's dtype, dlse in float32."""
    draw = np.random.default_rng(seed)
    (b, s, h, _), e = operands.q.shape, operands.v.shape[-1]
    do = draw.standard_normal((b, s, h, e)).astype(operands.q.dtype)
    return do, draw.standard_normal((b, h, s)).astype(np.float32)


def _is_floating(x: Any) -> bool:
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


def _widen(x: Any) -> jax.Array:
    x = np.asarray(x)
    return jnp.asarray(x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x)


def _per_query_head(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    return jnp.repeat(x.astype(spec.compute_dtype), spec.group, axis=2)


def _per_kv_head(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    return x.reshape(*x.shape[:2], x.shape[2] // spec.group, spec.group, x.shape[3]).sum(axis=3)


def _whole(operands: Operands) -> Any:
    rows, columns = (jnp.arange(n, dtype=jnp.int32) for n in (operands.q.shape[1], operands.k.shape[1]))
    return tile(operands, rows, columns)


def _raw_scores(spec: AttentionSpec, operands: Operands) -> jax.Array:
    q, k = operands.q.astype(spec.compute_dtype), _per_query_head(operands.k, spec)
    return jnp.einsum("bshd,bthd->bhst", q, k, precision="highest") * jnp.asarray(spec.scale, spec.compute_dtype)


def _scores(spec: AttentionSpec, operands: Operands, bias: Any, score_operands: Any) -> jax.Array:
    raw = _raw_scores(spec, operands)
    if 0 not in raw.shape:
        raw = scores.apply(spec.score_mods, raw, _whole(operands), bias, score_operands)
    return jnp.where(masks.dense(spec.mask, operands), raw, -jnp.inf)


def _softmax(spec: AttentionSpec, operands: Operands, s: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """exp(s - top) [B, H, S, T], its row sums with the sink and the finite top, both [B, H, S, 1]."""
    top = s.max(axis=-1, keepdims=True, initial=-jnp.inf)
    sinks = None if operands.sinks is None else operands.sinks[:, None, None]
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    p = jnp.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    return p, total if sinks is None else total + jnp.exp(sinks - top), top
