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
    spec: AttentionSpec, local: Operands, offsets: tuple[Any, Any, Any]
) -> tuple[AttentionSpec, Operands]:
    """Adds to the b, h and q that a shard's mask and score functions get.

    Args:
      spec, local: of the shard, which has examples.
      offsets: what to add to b, to h and to q: int32 scalars, that of q also [B]. They become one more operand of each
        function, so that all devices share one program.
    """
    added = jnp.stack(jnp.broadcast_arrays(*(jnp.asarray(x, jnp.int32) for x in offsets)), axis=-1)

    def predicate(f: Callable) -> Callable:
        def shifted(b: Any, h: Any, q: Any, k: Any, *arrays: Any) -> Any:
            *own, added = arrays
            more_b, more_h, more_q = (added[i] if added.ndim == 1 else added[b, i] for i in range(3))
            return f(b + more_b, h + more_h, q + more_q, k, *own)

        return shifted

    def score(f: Callable) -> Callable:
        return lambda s, *rest: predicate(functools.partial(f, s))(*rest)

    mods, score_operands = _wrap(spec.score_mods, ScoreMap, score, local.score_operands, (added, spec.compute_dtype))
    parts, mask_operands = _wrap(spec.mask.parts, Predicate, predicate, local.mask_operands, (added, None))
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
    added, dtype = extra
    argument = "mask" if dtype is None else "score_mods"
    result: list[Any] = []
    arrays: tuple[jax.Array, ...] = ()
    for item in items:
        if isinstance(item, kind):
            own, operands = operands[: item.function.operand_count], operands[item.function.operand_count :]
            function, read = trace(argument, wrapper(item.function), (*own, added), dtype)
            item = kind(function)
            arrays += read
        result.append(item)
    return tuple(result), arrays
