"""Keeps the example and head indices that user functions see those of the whole call, where a kernel sees a part of it.

A kernel numbers the examples and heads of the arrays it is given. When those are one device's part, or several mapped
calls folded into one batch, a user's function needs an offset and a period: both become one more operand of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa4 import masks
from jax_fa4.launch import KernelCall
from jax_fa4.scalar import ScalarFunction
from jax_fa4.scores import ScoreMap


def has_functions(call: KernelCall) -> bool:
    """Whether user functions take part."""
    return any(b.name.startswith(("mask_operands", "score_operands")) for b in call.inputs) or any(
        isinstance(x, masks.Predicate | ScoreMap) for x in (*call.spec.mask.parts, *call.spec.score_mods)
    )


def shifted(
    call: KernelCall, arrays: Sequence[jax.Array], example: Any, head: Any
) -> tuple[KernelCall, list[jax.Array]]:
    """`call` with functions that see ``b % period + example`` and ``h + head``; the period is the last batch dim."""
    period = arrays[0].shape[:-3][-1]
    place = jnp.stack([jnp.asarray(x, jnp.int32) for x in (example, head, period)])
    named = dict(zip((b.name for b in call.inputs), arrays, strict=True))
    operands: dict[str, list[jax.Array]] = {"mask_operands": [], "score_operands": []}

    def move(prefix: str, function: ScalarFunction, scalars: int) -> ScalarFunction:
        read = sum(1 for x in operands[prefix] if x is not place)
        operands[prefix] += [named[f"{prefix}_{read + i}"] for i in range(function.operand_count)] + [place]
        return _shift(function, scalars)

    parts: list[masks.Mask] = [
        masks.Predicate(move("mask_operands", p.function, 4)) if isinstance(p, masks.Predicate) else p
        for p in call.spec.mask.parts
    ]
    mods = tuple(
        ScoreMap(move("score_operands", m.function, 5)) if isinstance(m, ScoreMap) else m for m in call.spec.score_mods
    )
    mask: masks.Mask = masks.Full()
    for part in parts:
        mask &= part
    here = dataclasses.replace(call, spec=dataclasses.replace(call.spec, mask=mask, score_mods=mods))
    extra = {f"{prefix}_{i}": x for prefix, values in operands.items() for i, x in enumerate(values)}
    return here, [extra[b.name] if b.name in extra else named[b.name] for b in here.inputs]


@functools.lru_cache(maxsize=256)
def _shift(function: ScalarFunction, scalars: int) -> ScalarFunction:
    """The function with one more operand, int32 [3]: example offset, head offset, batch period."""

    def moved(*args):
        *values, place = args
        # Read as kernels can: one element each, by `dynamic_slice`.
        example, head, period = (jax.lax.dynamic_index_in_dim(place, i, keepdims=False) for i in range(3))
        values[scalars - 4] = jax.lax.rem(jnp.int32(values[scalars - 4]), period) + example
        values[scalars - 3] += head
        return function(*values)

    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in function.jaxpr.in_avals]
    closed = jax.make_jaxpr(moved)(*avals, jax.ShapeDtypeStruct((3,), jnp.int32))
    text = " ".join(str(closed.jaxpr).split())
    return ScalarFunction(f"{text} of {function.text}", closed, function.operand_count + 1, moved)
