"""The derivative of a user's score function with respect to the score, as another scalar function."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_fa4.scalar import ScalarFunction


@functools.lru_cache(maxsize=256)
def slope(function: ScalarFunction) -> ScalarFunction:
    """d function / d score; takes the same arguments."""

    def derivative(score, *rest):
        return jax.jvp(lambda s: function(s, *rest), (score,), (jnp.ones_like(score),))[1]

    jaxpr = jax.make_jaxpr(derivative)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in function.jaxpr.in_avals))
    return ScalarFunction(f"slope of {function.text}", jaxpr, function.operand_count, derivative)
