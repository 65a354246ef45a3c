"""User functions on a shard: they are to see the indices of the whole arrays."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..masks import Full, Predicate
from ..operands import Operands
from ..scalar import trace
from ..scores import ScoreMap
from ..spec import AttentionSpec


def with_global_indices(
    spec: AttentionSpec, local: Operands, batch_offset: Any, head_offset: Any
) -> tuple[AttentionSpec, Operands]:
    """Adds the shard's first example and head to the b and h that mask and score functions get.

    The offsets become one more operand of each function, so that all devices share one program.
    """
    offset = jnp.stack([jnp.asarray(batch_offset, jnp.int32), jnp.asarray(head_offset, jnp.int32)])

    def score(f: Callable) -> Callable:
        return lambda s, b, h, q, k, *arrays: f(s, b + arrays[-1][0], h + arrays[-1][1], q, k, *arrays[:-1])

    def predicate(f: Callable) -> Callable:
        return lambda b, h, q, k, *arrays: f(b + arrays[-1][0], h + arrays[-1][1], q, k, *arrays[:-1])

    mods, score_operands = _wrap(spec.score_mods, ScoreMap, score, local.score_operands, (offset, spec.compute_dtype))
    parts, mask_operands = _wrap(spec.mask.parts, Predicate, predicate, local.mask_operands, (offset, None))
    spec = dataclasses.replace(spec, score_mods=mods, mask=functools.reduce(operator.and_, parts, Full()))
    return spec, dataclasses.replace(local, score_operands=score_operands, mask_operands=mask_operands)


def _wrap(
    items: tuple,
    kind: type[ScoreMap] | type[Predicate],
    wrapper: Callable,
    operands: tuple[jax.Array, ...],
    extra: tuple[jax.Array, Any],
) -> tuple[tuple, tuple[jax.Array, ...]]:
    """The items, with each function of class `kind` wrapped, and the arrays that they then read."""
    offset, dtype = extra
    argument = "mask" if dtype is None else "score_mods"
    result: list[Any] = []
    arrays: tuple[jax.Array, ...] = ()
    for item in items:
        if isinstance(item, kind):
            own, operands = operands[: item.function.operand_count], operands[item.function.operand_count :]
            function, read = trace(argument, wrapper(item.function), (*own, offset), dtype)
            item = kind(function)
            arrays += read
        result.append(item)
    return tuple(result), arrays
