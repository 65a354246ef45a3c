"""Types with meshes in them: `jax.shard_map` with `check_vma`, and meshes with Explicit axes.

Inside shard_map, arrays that take part in one computation must vary over the same mesh axes.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

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


def with_auto_axes(function: Callable, out_specs: Any) -> Callable:
    """The function with Explicit mesh axes made Auto inside, so that XLA partitions it.

    Args:
      function: of arrays.
      out_specs: PartitionSpecs of its results, which are their types where axes are Explicit.
    """
    axes = jax.sharding.get_abstract_mesh().explicit_axes
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=out_specs) if axes else function


def spec_of(x: jax.Array) -> PartitionSpec:
    """How an array's axes lie on Explicit mesh axes, with an entry for each axis."""
    spec = jax.typeof(x).sharding.spec
    return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))
