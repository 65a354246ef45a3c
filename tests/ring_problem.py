"""A random call of attention over a spread sequence, and its results on one device, for tests of the ring."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jax_fa4
from jax_fa4.layout import from_layout, to_layout


def mesh_of(devices, kind=AxisType.Auto):
    return jax.make_mesh((devices,), ("sp",), axis_types=(kind,), devices=jax.devices()[:devices])


@dataclasses.dataclass(frozen=True)
class Problem:
    """Random inputs and cotangents; `options` are keywords of attention, in natural order."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    do: jax.Array
    dlse: jax.Array
    options: dict

    @classmethod
    def draw(cls, seed, options, rows=48, keys=None, heads=4, kv_heads=2, dtype="float32"):
        random = np.random.default_rng(seed)
        keys = keys or rows

        def normal(*shape):
            return jnp.asarray(random.standard_normal(shape), dtype)

        return cls(
            normal(2, rows, heads, 8), normal(2, keys, kv_heads, 8), normal(2, keys, kv_heads, 8),
            normal(2, rows, heads, 8), normal(2, heads, rows).astype(jnp.float32), options,
        )

    def results(self, attention):
        """(o, lse) of `attention(q, k, v, sinks)` and the gradients of q, k, v, sinks."""
        sinks = self.options.get("sinks")

        def loss(arrays):
            o, lse = attention(*arrays)
            finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
            return (o.astype(jnp.float32) * self.do).sum() + (finite * self.dlse).sum(), (o, lse)

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))((self.q, self.k, self.v, sinks))
        return [np.asarray(x, np.float64) for x in jax.tree.leaves((out, gradients))]

    def on_one_device(self):
        rest = {name: value for name, value in self.options.items() if name != "sinks"}
        return self.results(
            lambda q, k, v, sinks: jax_fa4.attention(
                q, k, v, sinks=sinks, return_lse=True, backend="xla", **rest)
        )

    def spread(self, run, layout="contiguous", devices=1):
        """The same by `run(q, k, v, sinks=, ...)` on arrays in a layout."""
        there, back = (functools.partial(f, layout=layout, devices=devices) for f in (to_layout, from_layout))
        rest = {name: value for name, value in self.options.items() if name != "sinks"}
        for name in ("q_segment_ids", "kv_segment_ids"):
            if name in rest:
                rest[name] = there(rest[name])

        def attention(q, k, v, sinks):
            o, lse = run(there(q), there(k), there(v), sinks=sinks, return_lse=True, backend="xla", **rest)
            return back(o), jnp.swapaxes(back(jnp.swapaxes(lse, 1, 2)), 1, 2)

        return self.results(attention)


def assert_close(got, want, tolerance=1e-5):
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        a, b = np.where(np.isneginf(a), 0, a), np.where(np.isneginf(b), 0, b)
        assert np.isfinite(a).all(), index
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1.0), (index, np.abs(a - b).max())


def further_down(score, b, h, q, k, slopes):
    return score - slopes[h] * jnp.abs(q - k) + 0.01 * b


SEGMENTS = jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 48)), jnp.int32)
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "causal sinks softcap": {"causal": True, "sinks": jnp.linspace(-1.0, 2.0, 4), "softcap": 3.0},
    "left window": {"causal": True, "window": (9, None)},
    "two-sided window": {"window": (10, 3)},
    "traced window": {"window": (jnp.int32(10), jnp.int32(3))},
    "segments": {"causal": True, "q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS},
    "lengths": {"causal": True, "q_lengths": jnp.array([40, 0]), "kv_lengths": jnp.array([30, 48])},
    "key lengths": {"kv_lengths": jnp.array([30, 0])},
    "positions": {"causal": True, "q_position": (3, 2), "kv_position": (0, 2)},
    "functions": {
        "mask": jax_fa4.MaskFn(lambda b, h, q, k: (q + k + b) % 3 != 0),
        "score_mods": jax_fa4.ScoreFn(further_down, operands=(jnp.linspace(0.0, 0.2, 4),)),
    },
}
