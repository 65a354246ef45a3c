"""Merging attention over disjoint sets of keys, in the compute dtype: float32, or float64 for float64 inputs."""

import jax
import jax.numpy as jnp


def merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two disjoint sets of keys from attention over each.

    Weights are exponentials of LSE minus the larger LSE, so nothing overflows; a set without keys (LSE = -inf, O = 0)
    changes nothing, and the union of two such sets is one.

    Args:
      a, b: (o [B, S, H, E], lse [B, H, S]), of the compute dtype.
    """
    (o_a, lse_a), (o_b, lse_b) = a, b
    largest = jnp.maximum(lse_a, lse_b)
    base = jnp.where(jnp.isfinite(largest), largest, 0.0)  # keeps exp(-inf - -inf) out
    weight_a, weight_b = jnp.exp(lse_a - base), jnp.exp(lse_b - base)
    total = weight_a + weight_b
    inverse = 1.0 / jnp.where(total > 0, total, 1.0)
    o = o_a * _per_row(weight_a * inverse) + o_b * _per_row(weight_b * inverse)
    return o, base + jnp.log(total)  # log(0) = -inf: no keys at all


def with_sink(part: tuple[jax.Array, jax.Array], sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds one logit a head, with a value of zero: O shrinks and LSE grows.

    Args:
      part: (o [B, S, H, E], lse [B, H, S]), of the compute dtype.
      sinks: [H], likewise.
    """
    o, lse = part
    sink = jnp.broadcast_to(sinks[None, :, None], lse.shape)
    return merge(part, (jnp.zeros_like(o), sink))


def _per_row(x: jax.Array) -> jax.Array:
    """[B, H, S] -> [B, S, H, 1]."""
    return jnp.swapaxes(x, 1, 2)[..., None]
