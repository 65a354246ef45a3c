"""Values inside `jax.shard_map`: arrays that take part in one computation must vary over the same mesh axes."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def varying_axes(tree: Any) -> frozenset[str]:
    """The manual mesh axes over which some array of a tree varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))


def match_varying(tree: Tree) -> Tree:
    """The tree with every array varying over all axes over which one of them does (its transpose sums over them)."""
    axes = varying_axes(tree)

    def cast(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def zeros_like_type(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros of a shape and dtype that vary over the mesh axes of `like`, to start a loop's carry."""
    zeros, axes = jnp.zeros(shape, dtype), jax.typeof(like).manual_axis_type.varying
    return jax.lax.pcast(zeros, tuple(sorted(axes)), to="varying") if axes else zeros
